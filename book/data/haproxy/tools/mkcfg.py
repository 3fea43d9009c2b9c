#!/usr/bin/env python3
"""Print haproxy.cfg.

With the argument `literal`, print a variant that was tried and rejected instead: its treatment is
the stock `balance random(2)`, which under maxconn 1 compares only requests in service.
"""

import sys

N_SERVERS, FIRST_PORT, FRONT_PORT = 20, 9100, 8080
literal = sys.argv[1:] == ["literal"]

FIELDS = (
    "t=%[var(txn.t)] te=%[date(0,us)] acc=%Ts.%ms id=%[var(txn.id)] arm=%[var(txn.arm)] srv=%s "
    "TR=%TR Tw=%Tw Tc=%Tc Tr=%Tr Ta=%Ta Tt=%Tt sq=%sq bq=%bq fc=%fc bc=%bc sc=%sc rc=%rc st=%ST "
    "ts=%tsc B=%B svc=%[var(txn.svc)] a=%[var(txn.a)] b=%[var(txn.b)] la=%[var(txn.la)] "
    "lb=%[var(txn.lb)] n=%[var(txn.n)]"
)

print(f"""\
# A/B test of two load-balancing policies.  {N_SERVERS} servers, one request at a time each (maxconn 1), FCFS queue per server
# held by HAProxy.  TREAT_PERMILLE (environment): share of requests sent to the treatment arm, in 1/1000
# (500 = A/B run, 0 = all control, 1000 = all treatment).
global
    nbthread 1
    maxconn 4000
    log stdout len 2048 format raw local0 info

defaults
    mode http
    log global
    option dontlognull
    no option redispatch
    timeout connect 5s
    timeout client  120s
    timeout server  120s
    timeout queue   120s

frontend web
    bind 127.0.0.1:{FRONT_PORT} backlog 4096
    http-request set-var(txn.t)   date(0,us)
    http-request set-var(txn.id)  url_param(id)
    http-request set-var(txn.svc) url_param(s)
    http-request set-var(txn.n)   be_conn(app)
    log-format "{FIELDS}"
    default_backend app

backend app
    balance random(2)
    http-reuse always
    # arm: 1 = treatment, 0 = control, drawn afresh for every request
    http-request set-var(txn.arm) int(0)
    http-request set-var(txn.arm) int(1) if {{ rand(1000) lt "${{TREAT_PERMILLE}}" }}
    # two distinct candidate servers, uniformly at random
    http-request set-var(txn.a) rand({N_SERVERS})
    http-request set-var(txn.b) rand({N_SERVERS - 1}),add(1),add(txn.a),mod({N_SERVERS})
    # current load of each candidate = requests in service (0/1) + requests in its HAProxy queue""")  # noqa: E501
for c in "ab":
    for k in range(N_SERVERS):
        here = f"if {{ var(txn.{c}) -m int {k} }}"
        print(f"    http-request set-var(txn.q{c}) srv_queue(app/s{k}) {here}")
        print(f"    http-request set-var(txn.l{c}) srv_conn(app/s{k}),add(txn.q{c}) {here}")
print("    # control: candidate a.   treatment: the less loaded of a and b (tie: a)")
print("    http-request set-var-fmt(txn.srv) s%[var(txn.a)]")
if literal:
    print(
        "    use-server %[var(txn.srv)] if { var(txn.arm) -m int 0 }       "
        "# treatment falls through to balance random(2)"
    )
else:
    less = "{ var(txn.arm) -m int 1 } { var(txn.lb),sub(txn.la) lt 0 }"
    print(f"    http-request set-var-fmt(txn.srv) s%[var(txn.b)] if {less}")
    print("    use-server %[var(txn.srv)] if TRUE")
for k in range(N_SERVERS):
    print(f"    server s{k} 127.0.0.1:{FIRST_PORT + k} maxconn 1 weight 100")
