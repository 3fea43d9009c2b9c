"""Extremes: endless queues, heavy tails, load 0.999, one server, all servers asked, late times.

Servers, queue lengths and departures are worked out again from arrivals, service times and
candidates, with nothing but Lindley's recursion on plain lists.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

import qdq
from qdq.simulate import seed_sequence

simulator = importlib.import_module("qdq.simulate")  # qdq.simulate itself is the function

EVERYTHING = ("service_time", "in_system", "candidates", "choices", "queue_lengths")


def work_out_again(log: qdq.TaskLog):
    """Send the tasks of a log by power-of-d: servers, departures, queue lengths that were seen.

    Service must take as long at every server, since the log has it at the chosen ones only.
    """
    d = log.scenario.control.d, log.scenario.treatment.d
    delay = log.scenario.information_delay
    joined: list[list[float]] = [[] for _ in range(log.n_servers)]
    departures: list[list[float]] = [[] for _ in range(log.n_servers)]
    for server, _, departure in log.carried_over.tolist():
        joined[int(server)].append(-np.inf)
        departures[int(server)].append(departure)
    servers, ends, seen = [], [], []
    for t, service, z, order in zip(
        log.arrival.tolist(),
        log.service_time.tolist(),
        log.treated.tolist(),
        log.candidates.tolist(),
        strict=True,
    ):
        # Departures from a FCFS server are in order, as those who join are.
        lengths = [
            (len(line) if log.scenario.counts_own_dispatches else bisect_right(line, t - delay))
            - bisect_right(gone, t - delay)
            for line, gone in zip(joined, departures, strict=True)
        ]
        server = min(order[: d[z]], key=lengths.__getitem__)  # the first of the shortest
        joined[server].append(t)
        line = departures[server]
        line.append(max(t, line[-1] if line else 0.0) + service)
        servers.append(server)
        ends.append(line[-1])
        seen.append(lengths)
    return np.array(servers), np.array(ends), np.array(seen)


def agrees(scenario: qdq.Scenario, n: int, warm_up: float = 0.0, seed: int = 1) -> qdq.TaskLog:
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), n, seed, warm_up, EVERYTHING)
    servers, ends, lengths = work_out_again(log)
    np.testing.assert_array_equal(log.server, servers)
    np.testing.assert_array_equal(log.queue_lengths, lengths)
    if scenario.information_delay == 0.0:
        np.testing.assert_array_equal(log.in_system, lengths.sum(axis=1))
    if warm_up == 0.0 and scenario.information_delay == 0.0:
        np.testing.assert_array_equal(log.departure, ends)
    else:  # times inside count from another point
        np.testing.assert_allclose(log.departure, ends, rtol=1e-12)
    # Where only servers and departures are asked for, power-of-d has a loop of its own.
    bare = qdq.simulate(scenario, qdq.Bernoulli(0.5), n, seed, warm_up)
    np.testing.assert_array_equal(bare.server, log.server)
    np.testing.assert_array_equal(bare.departure, log.departure)
    return log


# --- queues ---------------------------------------------------------------------------------------


def one_server(load: float, service: object = qdq.Exponential()) -> qdq.Scenario:
    return qdq.Scenario(
        n_servers=1,
        arrivals=qdq.Poisson(load),
        service=service,
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(1),
        allow_unstable=True,
    )


@pytest.mark.parametrize("warm_up", [0.0, 20_000.0])
def test_one_server_at_load_0_999(warm_up):
    log = agrees(one_server(0.999), 200_000, warm_up)
    assert log.queue_lengths.max() > 300
    assert (len(log.carried_over) > 8) == (warm_up > 0.0)


def test_one_server_whose_queue_grows_to_a_hundred_thousand():
    log = agrees(one_server(2.0), 200_000)
    assert log.queue_lengths.max() > 95_000


def test_one_server_is_exact_to_rounding():
    """Lindley in fractions: what rounding does to departures in 50,000 tasks of one busy period."""
    log = qdq.simulate(
        one_server(1.5), qdq.AllControl(), 50_000, 2, 0.0, ("service_time", "candidates")
    )
    end = Fraction(0)
    worst = Fraction(0)
    for t, service, departure in zip(
        log.arrival.tolist(), log.service_time.tolist(), log.departure.tolist(), strict=True
    ):
        end = max(end, Fraction(t)) + Fraction(service)
        worst = max(worst, abs(Fraction(departure) - end) / end)
    assert worst < 1e-12


@pytest.mark.parametrize("load", [0.8, 0.999])
def test_pareto_service_with_infinite_variance_at_one_server(load):
    log = agrees(one_server(load, qdq.Pareto(1.5)), 100_000)
    assert log.service_time.max() > 300
    assert log.queue_lengths.max() > 300


@pytest.mark.parametrize("service", [qdq.Exponential(), qdq.Deterministic(), qdq.Pareto(1.5)])
@pytest.mark.parametrize(
    ("n_servers", "d", "load"),
    [
        (2, (2, 2), 0.999),
        (2, (1, 2), 3.0),
        (20, (2, 3), 0.999),
        (20, (1, 20), 1.2),
        (20, (12, 13), 0.95),  # candidates are drawn in one way up to 12, in another above
        (300, (1, 300), 0.999),
    ],
)
def test_many_servers_and_all_of_them_asked(n_servers, d, load, service):
    scenario = qdq.Scenario(
        n_servers=n_servers,
        arrivals=qdq.Poisson(load),
        service=service,
        control=qdq.PowerOfD(d[0]),
        treatment=qdq.PowerOfD(d[1]),
        allow_unstable=True,
    )
    log = agrees(scenario, 3000 if n_servers == 300 else 20_000)
    # More than the 8 departures that a server's line holds, but where that would take long.
    assert d[0] > 2 or n_servers == 300 or log.queue_lengths.max() > 8


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("n_servers", "load"), [(1, 0.999), (2, 1.3), (20, 0.999)])
def test_more_dispatches_unseen_than_a_line_holds(n_servers, load, own):
    scenario = qdq.Scenario(
        n_servers=n_servers,
        arrivals=qdq.Poisson(load),
        information_delay=40.0,
        counts_own_dispatches=own,
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(min(n_servers, 4)),
        allow_unstable=True,
    )
    agrees(scenario, 10_000)


@pytest.mark.parametrize(("n_servers", "load"), [(1, 1.5), (2, 0.999), (20, 1.1), (300, 0.999)])
def test_power_of_all_servers_chooses_as_long_a_queue_as_join_the_shortest(n_servers, load):
    scenario = qdq.Scenario(
        n_servers=n_servers,
        arrivals=qdq.Poisson(load),
        control=qdq.PowerOfD(n_servers),
        treatment=qdq.JoinShortestQueue(),
        allow_unstable=True,
    )
    n = 20_000
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), n, 3, 0.0, EVERYTHING)
    tasks = np.arange(n)
    shortest = log.queue_lengths.min(axis=1)
    for choice in (log.choice_control, log.choice_treatment):
        np.testing.assert_array_equal(log.queue_lengths[tasks, choice], shortest)
    assert n_servers == 1 or np.any(log.choice_control != log.choice_treatment)  # ties differ


# --- late times -----------------------------------------------------------------------------------
#
# Times are kept from a base that moves on with the run, so what they lose to rounding does not grow
# with the time. Only the columns of a log, which hold the time itself, round to its last place:
# 1.2e-7 at 1e9.

LATE = 1e9
DELAYS = [(0.0, False), (0.7, False), (0.7, True)]


def late_scenario(arrivals: object, delay: tuple[float, bool], **fields: object) -> qdq.Scenario:
    return qdq.Scenario(
        n_servers=5,
        arrivals=arrivals,
        information_delay=delay[0] / 2,
        dispatch_delay=delay[0] / 2,
        counts_own_dispatches=delay[1],
        **fields,
    )


def trace(start: float) -> qdq.ArrivalTrace:
    """Arrivals whose distances from `start`, if whole and below 2^31, are the same to the bit."""
    gaps = np.random.default_rng(1).exponential(1 / 4.5, 40_000)
    return qdq.ArrivalTrace(start + np.cumsum(np.round(gaps * 2.0**20) / 2.0**20))


def runs(scenario: qdq.Scenario, design: qdq.Design, base: float = 0.0, clock: float = 0.0):
    """Run from an empty system at time base + clock; return servers and response times."""
    engine, _ = simulator._engine(scenario, seed_sequence(4), design)
    state, _ = simulator._warmed_up(engine, 0.0)
    state = state._replace(base=state.base + base, clock=state.clock + clock)
    n = 40_000
    columns = simulator._record(n, (), engine.system.depth, scenario.n_servers)
    last = [base for base, _ in engine.runs(state, n, columns)][-1]
    return columns.server, columns.departure - columns.arrival, last + columns.arrival[-1]


ARRIVALS = [
    (lambda start: qdq.Poisson(0.9), "Poisson"),
    (lambda start: qdq.Periodic(0.8, 0.5, 50.0), "Periodic"),
    (trace, "ArrivalTrace"),
]


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("design", [qdq.Bernoulli(0.5), qdq.Switchback(8.0)])
@pytest.mark.parametrize("arrivals", [a for a, _ in ARRIVALS], ids=[name for _, name in ARRIVALS])
def test_response_times_are_as_precise_at_1e9(arrivals, design, delay):
    if isinstance(design, qdq.Switchback):
        # Late periods have other draws: the policies are the same, so that the paths are.
        fields = {"control": qdq.PowerOfD(2), "treatment": qdq.PowerOfD(2)}
    else:
        fields = {}
    is_trace = isinstance(arrivals(0.0), qdq.ArrivalTrace)
    servers, responses, early = runs(late_scenario(arrivals(0.0), delay, **fields), design)
    assert early < 1e5
    scenario = late_scenario(arrivals(1.7e9 if is_trace else 0.0), delay, **fields)
    # The clock says 1e9 and the base has not moved; the base has; or the trace is late.
    begins = [{}] if is_trace else [{"clock": LATE}, {"base": LATE}]
    for begin in begins:
        late_servers, late_responses, end = runs(scenario, design, **begin)
        assert end > LATE
        np.testing.assert_array_equal(late_servers, servers)
        np.testing.assert_allclose(late_responses, responses, rtol=0, atol=1e-9)


def test_without_a_base_response_times_would_be_rough_at_1e9(monkeypatch):
    scenario = late_scenario(qdq.Poisson(0.9), DELAYS[0])
    _, responses, _ = runs(scenario, qdq.Bernoulli(0.5))
    monkeypatch.setattr(simulator, "_ARRIVALS_TO_A_BASE", 1 << 60)
    _, late, _ = runs(scenario, qdq.Bernoulli(0.5), clock=LATE)
    assert np.abs(late - responses).max() > 1e-8


def test_time_scales_exactly():
    """The same system with a unit of time 2^20 times as short: a thousand tasks reach 1e9."""
    unit = 2.0**20
    slow = qdq.Scenario(
        n_servers=5,
        arrivals=qdq.Poisson(0.9 / unit),
        service_rates=1 / unit,
        information_delay=unit,
    )
    fast = qdq.Scenario(n_servers=5, arrivals=qdq.Poisson(0.9), information_delay=1.0)
    logs = [
        qdq.simulate(scenario, qdq.Bernoulli(0.5), 50_000, 6, warm_up, ("queue_lengths",))
        for scenario, warm_up in ((slow, 100 * unit), (fast, 100.0))
    ]
    assert logs[0].arrival[-1] > 1e10
    np.testing.assert_array_equal(logs[0].server, logs[1].server)
    np.testing.assert_array_equal(logs[0].queue_lengths, logs[1].queue_lengths)
    np.testing.assert_allclose(logs[0].arrival, logs[1].arrival * unit, rtol=1e-12)
    np.testing.assert_allclose(logs[0].departure, logs[1].departure * unit, rtol=1e-12)


POLICIES = [
    {"control": qdq.PowerOfD(1), "treatment": qdq.PowerOfD(3)},
    {"control": qdq.JoinShortestQueue(), "treatment": qdq.LeastWorkLeft()},
    {"control": qdq.RoundRobin(), "treatment": qdq.JoinIdleQueue()},
]


@pytest.mark.parametrize("policies", POLICIES, ids=["power-of-d", "all servers", "others"])
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize(
    ("arrivals", "design", "service"),
    [
        (qdq.Poisson(0.9), qdq.Bernoulli(0.5), qdq.Exponential()),
        (qdq.Poisson(1.3), qdq.Switchback(7.3), qdq.Deterministic()),  # queues overflow
        (qdq.Periodic(0.8, 1.0, 9.7), qdq.Bernoulli(0.5), qdq.Pareto(1.5)),
        (trace(1.7e9), qdq.Switchback(8.0), qdq.Exponential()),
        (trace(-3000.0), qdq.Bernoulli(0.5), qdq.LogNormal(2.0)),
    ],
    ids=["Poisson", "overload", "Periodic", "late trace", "trace from before 0"],
)
def test_moving_the_base_changes_no_choice(monkeypatch, arrivals, design, service, delay, policies):
    scenario = late_scenario(arrivals, delay, service=service, allow_unstable=True, **policies)
    warm_up = 0.0 if isinstance(arrivals, qdq.ArrivalTrace) else 50.0
    n = 10_000
    seldom = qdq.simulate(scenario, design, n, 5, warm_up, EVERYTHING)
    bare = qdq.simulate(scenario, design, n, 5, warm_up)
    monkeypatch.setattr(simulator, "_ARRIVALS_TO_A_BASE", 4)
    monkeypatch.setattr(simulator, "CHUNK", 16)
    bases = set()
    moved = simulator._moved
    monkeypatch.setattr(
        simulator, "_moved", lambda state, by: bases.add(state.base + by) or moved(state, by)
    )
    often = qdq.simulate(scenario, design, n, 5, warm_up, EVERYTHING)
    assert len(bases) > 100
    for name in ("treated", "server", "in_system", "period", "queue_lengths", "choice_control"):
        np.testing.assert_array_equal(getattr(often, name), getattr(seldom, name))
    for name in ("arrival", "departure", "service_time"):
        np.testing.assert_allclose(getattr(often, name), getattr(seldom, name), rtol=1e-9)
    bare_often = qdq.simulate(scenario, design, n, 5, warm_up)
    for name in ("server", "departure"):
        np.testing.assert_array_equal(getattr(bare, name), getattr(seldom, name))
        np.testing.assert_array_equal(getattr(bare_often, name), getattr(often, name))


@pytest.mark.parametrize("shift", [-(2.0**30), -500.0, 2.0**30])
def test_a_trace_may_begin_at_any_time(shift):
    requirements = np.random.default_rng(2).exponential(1.0, 3000)
    at_zero, elsewhere = (
        qdq.simulate(
            late_scenario(
                qdq.ArrivalTrace(np.asarray(trace(0.0).times)[:3000] + start),
                DELAYS[1],
                service=qdq.ServiceTrace(requirements),
            ),
            qdq.Bernoulli(0.5),
            3000,
            7,
            0.0,
            EVERYTHING,
        )
        for start in (0.0, shift)
    )
    np.testing.assert_array_equal(elsewhere.server, at_zero.server)
    np.testing.assert_array_equal(elsewhere.queue_lengths, at_zero.queue_lengths)
    np.testing.assert_array_equal(elsewhere.in_system, at_zero.in_system)
    np.testing.assert_allclose(elsewhere.departure - shift, at_zero.departure, atol=3e-7)


def test_the_billionth_task_has_draws_like_any_other():
    scenario = late_scenario(qdq.Poisson(0.9), DELAYS[0])
    engine, _ = simulator._engine(scenario, seed_sequence(4), qdq.Bernoulli(0.5))
    n = 20_000
    for first in (10**9, 2**32 - n // 2):  # a counter's lower word ends inside
        state, _ = simulator._warmed_up(engine, 0.0)
        columns = simulator._record(n, ("service_time", "candidates"), 3, 5)
        engine.run(state, columns, first, first + n)
        assert columns.arrival[-1] == pytest.approx(n / 4.5, rel=0.04)
        assert columns.service_time.mean() == pytest.approx(1.0, abs=0.04)
        assert np.unique(columns.service_time).size == n
        assert columns.treated.mean() == pytest.approx(0.5, abs=0.02)
        assert all(len({*row}) == 3 for row in columns.candidates.tolist())
        assert all(a < b for a, b in pairwise(columns.arrival.tolist()))
