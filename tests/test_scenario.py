"""Scenarios, policies and designs: what they accept and refuse, and when a system is stable."""

from __future__ import annotations

import json
import math
from itertools import combinations

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qdq
from qdq.designs import design_from_dict
from qdq.policies import policy_from_dict


@numba.njit
def join_first_candidate(queue_lengths, work, rates, candidates, u):
    return candidates[0]


@numba.njit
def too_few_arguments(queue_lengths, work):
    return 0


MALFORMED = [
    (
        lambda: qdq.Poisson(0),
        ValueError,
        r"rate=0 is not allowed: rate must be an arrival rate per server > 0",
    ),
    (lambda: qdq.Poisson(-1.0), ValueError, r"rate=-1.0 is not allowed"),
    (lambda: qdq.Poisson(math.nan), ValueError, r"rate=nan is not allowed"),
    (lambda: qdq.Poisson(math.inf), ValueError, r"rate=inf is not allowed"),
    (lambda: qdq.Poisson("0.8"), TypeError, r"rate='0.8' is not a number"),
    (lambda: qdq.Poisson(True), TypeError, r"rate=True is not a number"),
    (
        lambda: qdq.Periodic(0.7, 1.2, 10),
        ValueError,
        r"amplitude=1.2 is not allowed: amplitude must be in \[0, 1\]",
    ),
    (lambda: qdq.Periodic(0.7, -0.1, 10), ValueError, r"amplitude=-0.1"),
    (
        lambda: qdq.Periodic(0.7, 0.2, 0),
        ValueError,
        r"period=0 is not allowed: period must be a time > 0",
    ),
    (lambda: qdq.ArrivalTrace([1.0, 3.0, 2.0]), ValueError, r"times\[2\]=2.0 is before times\[1\]"),
    (lambda: qdq.ArrivalTrace([1.0]), ValueError, r"times has 1 entries"),
    (lambda: qdq.ArrivalTrace([1.0, math.nan]), ValueError, r"times\[1\]=.*nan.* is not finite"),
    (
        lambda: qdq.ArrivalTrace(["x", "y"]),
        TypeError,
        r"times holds something that is not a number",
    ),
    (
        lambda: qdq.Pareto(1.0),
        ValueError,
        r"shape=1.0 is not allowed: shape must be a tail index > 1",
    ),
    (
        lambda: qdq.LogNormal(0),
        ValueError,
        r"cv=0 is not allowed: cv must be a coefficient of variation > 0",
    ),
    (lambda: qdq.ServiceTrace([1.0, -2.0]), ValueError, r"requirements\[1\]=-2.0 is negative"),
    (lambda: qdq.ServiceTrace([0.0, 0.0]), ValueError, r"requirements are all zero"),
    (lambda: qdq.ServiceTrace([]), ValueError, r"requirements has shape \(0,\)"),
    (lambda: qdq.PowerOfD(0), ValueError, r"d=0 is not allowed: d must be an integer >= 1"),
    (lambda: qdq.PowerOfD(1.5), ValueError, r"d=1.5 is not allowed"),
    (lambda: qdq.PowerOfD("2"), TypeError, r"d='2' is not an integer"),
    (lambda: qdq.ShortestExpectedDelay(-1), ValueError, r"d=-1 is not allowed"),
    (
        lambda: qdq.UserPolicy(lambda *a: 0),
        TypeError,
        r"is not compiled: function must be decorated with numba.njit",
    ),
    (
        lambda: qdq.UserPolicy(too_few_arguments),
        TypeError,
        r"takes 2 arguments: it must take the five",
    ),
    (lambda: qdq.Bernoulli(0.0), ValueError, r"propensity=0.0 is not allowed"),
    (lambda: qdq.Bernoulli(1), ValueError, r"propensity=1 is not allowed"),
    (
        lambda: qdq.Switchback(0.0),
        ValueError,
        r"period=0.0 is not allowed: period must be a time > 0",
    ),
    (lambda: qdq.Switchback(10.0, 1.5), ValueError, r"propensity=1.5"),
    (lambda: qdq.ServerSplit(0.0), ValueError, r"share=0.0 is not allowed"),
    (
        lambda: qdq.Scenario(n_servers=0),
        ValueError,
        r"n_servers=0 is not allowed: n_servers must be an integer from 1 to 16777216",
    ),
    (lambda: qdq.Scenario(n_servers=2.5), ValueError, r"n_servers=2.5"),
    (lambda: qdq.Scenario(n_servers=2**24 + 1), ValueError, r"n_servers=16777217"),
    (
        lambda: qdq.Scenario(arrivals=0.8),
        TypeError,
        r"arrivals=0.8 is not allowed: arrivals must be one of Poisson",
    ),
    (
        lambda: qdq.Scenario(service="exponential"),
        TypeError,
        r"service='exponential' is not allowed",
    ),
    (lambda: qdq.Scenario(service_rates=0.0), ValueError, r"service_rates=0.0 is not allowed"),
    (lambda: qdq.Scenario(service_rates=[1.0, 2.0]), ValueError, r"service_rates has 2 entries"),
    (
        lambda: qdq.Scenario(n_servers=3, service_rates=[1, 1, -1]),
        ValueError,
        r"service_rates\[2\]=-1.0 is not > 0",
    ),
    (
        lambda: qdq.Scenario(information_delay=-0.5),
        ValueError,
        r"information_delay=-0.5 .* a time >= 0",
    ),
    (lambda: qdq.Scenario(dispatch_delay=math.inf), ValueError, r"dispatch_delay=inf"),
    (
        lambda: qdq.Scenario(counts_own_dispatches=1),
        TypeError,
        r"counts_own_dispatches=1 .* True or False",
    ),
    (lambda: qdq.Scenario(control=2), TypeError, r"control=2 is not a policy"),
    (
        lambda: qdq.Scenario(n_servers=2),
        ValueError,
        r"treatment=PowerOfD\(d=3\) samples more servers",
    ),
    (
        lambda: qdq.Scenario(arrivals=qdq.Poisson(1.0)),
        ValueError,
        r"unstable under control=.* its load is 1 ",
    ),
    (
        lambda: qdq.Scenario(
            n_servers=2,
            service_rates=[0.5, 1.5],
            control=qdq.PowerOfD(1),
            treatment=qdq.PowerOfD(2),
        ),
        ValueError,
        r"unstable under control=PowerOfD\(d=1\): its load is 1.6",
    ),
    (
        lambda: qdq.Scenario(arrivals=qdq.Poisson(0.9), service=qdq.ServiceTrace([1.0, 2.0])),
        ValueError,
        r"load is 1.35",
    ),
    (
        lambda: policy_from_dict({"type": "Magic"}),
        ValueError,
        r"type='Magic' is not allowed: type must be one of",
    ),
    (lambda: design_from_dict({"type": "Magic"}), ValueError, r"type='Magic'"),
    (
        lambda: qdq.Scenario.from_dict({"speed": 3}),
        ValueError,
        r"scenario field='speed' is not allowed",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), MALFORMED)
def test_malformed_specifications_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_unknown_fields_and_positional_scenarios_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'lam'"):
        qdq.Scenario(lam=0.8)
    with pytest.raises(TypeError, match="positional"):
        qdq.Scenario(20)


def test_specifications_are_frozen():
    for spec, name in [
        (qdq.Scenario(), "n_servers"),
        (qdq.PowerOfD(2), "d"),
        (qdq.Poisson(0.5), "rate"),
    ]:
        with pytest.raises(AttributeError):
            setattr(spec, name, 3)
    trace = qdq.ServiceTrace([1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        trace.requirements[0] = 5.0


# --- stability ------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.2, 3.0), min_size=2, max_size=6),
    st.integers(1, 6),
    st.floats(0.1, 2.0),
)
def test_sampled_policies_follow_the_subset_condition(rates, d, lam):
    # Foss and Chernova: every set of servers must serve what can be dispatched nowhere else.
    n = len(rates)
    d = min(d, n)
    worst = 0.0
    for size in range(d, n + 1):
        for servers in combinations(range(n), size):
            demand = n * lam * math.comb(size, d) / math.comb(n, d)
            worst = max(worst, demand / sum(rates[i] for i in servers))
    assert qdq.PowerOfD(d).load(np.array(rates), n * lam) == pytest.approx(worst, rel=1e-12)
    assert qdq.ShortestExpectedDelay(d).load(np.array(rates), n * lam) == pytest.approx(
        worst, rel=1e-12
    )


def test_loads_of_the_other_policies():
    rates, lam = np.array([0.5, 1.0, 1.5, 2.0]), 0.4
    demand = 4 * lam
    assert qdq.JoinShortestQueue().load(rates, demand) == pytest.approx(demand / 5.0)
    assert qdq.LeastWorkLeft().load(rates, demand) == pytest.approx(demand / 5.0)
    assert qdq.RoundRobin().load(rates, demand) == pytest.approx(lam / 0.5)
    assert qdq.JoinIdleQueue().load(rates, demand) == pytest.approx(lam / 0.5)
    assert qdq.JoinIdleQueue().load(np.ones(4), demand) == pytest.approx(lam)
    with pytest.warns(UserWarning, match="total service rate alone"):
        user = qdq.UserPolicy(join_first_candidate)
    assert user.load(rates, demand) == pytest.approx(demand / 5.0)


def test_scenario_load_is_the_larger_and_counts_a_periodic_rate_by_its_mean():
    rates = [0.7] * 10 + [1.3] * 10
    scenario = qdq.Scenario(
        arrivals=qdq.Periodic(0.6, 0.9, 50), service_rates=rates, control=qdq.PowerOfD(1)
    )
    assert scenario.load == pytest.approx(0.6 / 0.7)
    assert qdq.Scenario(arrivals=qdq.Poisson(0.8)).load == pytest.approx(0.8)
    assert qdq.Scenario(
        arrivals=qdq.Poisson(0.4), service=qdq.ServiceTrace([1.0, 3.0])
    ).load == pytest.approx(0.8)


def test_unstable_scenarios_must_be_asked_for_and_have_no_default_warm_up():
    scenario = qdq.Scenario(arrivals=qdq.Poisson(1.2), allow_unstable=True)
    assert scenario.load == pytest.approx(1.2)
    with pytest.raises(ValueError, match=r"warm_up=None is not allowed at load 1\.2"):
        scenario.default_warm_up  # noqa: B018
    with pytest.raises(ValueError, match="warm_up=None"):
        qdq.simulate(scenario, qdq.Bernoulli(0.5), 10, seed=1)
    assert qdq.simulate(scenario, qdq.Bernoulli(0.5), 10, seed=1, warm_up=0.0).n_tasks == 10


def test_defaults_of_horizon_and_warm_up():
    scenario = qdq.Scenario(arrivals=qdq.Poisson(0.8))
    assert scenario.default_horizon == 480
    assert qdq.Scenario(arrivals=qdq.Poisson(0.95)).default_horizon == 570
    assert scenario.default_warm_up == pytest.approx(20 / 0.2)
    slow = scenario.replace(control=qdq.PowerOfD(1))
    assert slow.default_warm_up == pytest.approx(5 / (1 - math.sqrt(0.8)) ** 2)
    rough = slow.replace(service=qdq.LogNormal(3.0))
    assert rough.default_warm_up == pytest.approx(5 * slow.default_warm_up)
    few = qdq.Scenario(n_servers=3, arrivals=qdq.Poisson(0.95))
    assert few.default_warm_up == pytest.approx(5 / 3 / (1 - math.sqrt(0.95)) ** 2)
    fast_servers = scenario.replace(service_rates=2.0)
    assert fast_servers.default_warm_up == pytest.approx(20 / 0.6 / 2)
    assert scenario.replace(arrivals=qdq.Periodic(0.8, 0.1, 5000)).default_warm_up == 5000
    assert scenario.replace(arrivals=qdq.ArrivalTrace(np.arange(100) / 10)).default_warm_up == 0


# --- writing down and reading back ----------------------------------------------------------------

SCENARIOS = [
    qdq.Scenario(),
    qdq.Scenario(
        n_servers=3,
        arrivals=qdq.Periodic(0.3, 0.5, 7.0),
        service=qdq.Pareto(2.5),
        service_rates=[1.0, 1.5, 2.0],
        information_delay=0.1,
        dispatch_delay=0.2,
        counts_own_dispatches=True,
        control=qdq.RoundRobin(),
        treatment=qdq.ShortestExpectedDelay(2),
    ),
    qdq.Scenario(
        n_servers=2,
        arrivals=qdq.ArrivalTrace([0.0, 1.0, 1.0, 4.0]),
        service=qdq.ServiceTrace([0.1, 0.2, 0.3, 0.25]),
        control=qdq.JoinIdleQueue(),
        treatment=qdq.LeastWorkLeft(),
    ),
    qdq.Scenario(service=qdq.LogNormal(2.0), treatment=qdq.JoinShortestQueue()),
    qdq.Scenario(service=qdq.Deterministic()),
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_survive_json(scenario):
    again = qdq.Scenario.from_dict(json.loads(json.dumps(scenario.to_dict())))
    assert again == scenario
    assert hash(again) == hash(scenario)
    assert again.load == scenario.load


@pytest.mark.parametrize(
    "design",
    [
        qdq.Bernoulli(0.3),
        qdq.Switchback(20.0, 0.4),
        qdq.ServerSplit(0.25),
        qdq.AllControl(),
        qdq.AllTreatment(),
    ],
)
def test_designs_survive_json(design):
    assert design_from_dict(json.loads(json.dumps(design.to_dict()))) == design


def test_a_users_policy_cannot_be_written_down():
    with pytest.warns(UserWarning, match="total service rate"):
        scenario = qdq.Scenario(treatment=qdq.UserPolicy(join_first_candidate))
    with pytest.raises(TypeError, match="cannot be written to a file"):
        scenario.to_dict()


def test_service_laws_have_mean_one_and_their_variance():
    assert qdq.Pareto(2.5).scv == pytest.approx(1 / (2.5 * 0.5))
    assert math.isinf(qdq.Pareto(2.0).scv)
    scale, exponent = qdq.Pareto(3.0).kernel_parameters
    assert scale / (1 + exponent) == pytest.approx(1.0)  # the integral of scale * u ** exponent
    mu, sigma = qdq.LogNormal(1.5).kernel_parameters
    assert math.exp(mu + sigma**2 / 2) == pytest.approx(1.0)
    assert math.expm1(sigma**2) == pytest.approx(1.5**2)


# --- server split ---------------------------------------------------------------------------------


def split(scenario, share=0.5, seed=1):
    return qdq.ServerSplit(share).treated_servers(scenario, np.random.SeedSequence(seed))


@given(st.integers(0, 1000), st.sampled_from([0.3, 0.5, 0.7]))
def test_a_split_is_stratified_by_rate(seed, share):
    scenario = qdq.Scenario(arrivals=qdq.Poisson(0.6), service_rates=[0.7] * 10 + [1.3] * 10)
    treated = split(scenario, share, seed)
    assert treated.sum() == round(20 * share)
    assert abs(treated[:10].sum() - 10 * share) < 1
    assert abs(treated[10:].sum() - 10 * share) < 1


def test_a_split_is_random_and_uniform():
    scenario = qdq.Scenario()
    counts = sum(split(scenario, seed=seed).astype(int) for seed in range(2000))
    # Binomial(2000, 1/2) for each server: 5 standard deviations are 112.
    assert np.abs(counts - 1000).max() < 112


def test_a_split_leaves_each_arm_enough_servers():
    scenario = qdq.Scenario(n_servers=8, treatment=qdq.PowerOfD(3))
    assert split(scenario, 0.05).sum() == 3
    assert split(scenario, 0.95).sum() == 5
    with pytest.raises(ValueError, match="n_servers=5 is too few"):
        split(qdq.Scenario(n_servers=5, treatment=qdq.PowerOfD(3)))


def test_an_unstable_group_is_refused():
    # Round robin over all four needs lam < 0.5; each group gets tasks in proportion to its
    # capacity, and in the group of servers 0, 1 and 3 that is 0.57 tasks a server.
    scenario = qdq.Scenario(
        n_servers=4,
        arrivals=qdq.Poisson(0.49),
        service_rates=[0.5, 1.5, 0.5, 1.5],
        control=qdq.RoundRobin(),
        treatment=qdq.RoundRobin(),
    )
    qdq.ServerSplit(0.5).check_stable(scenario, np.array([True, True, False, False]))
    with pytest.raises(ValueError, match=r"leaves treatment with 3 servers at load 1\.143"):
        qdq.ServerSplit(0.75).check_stable(scenario, np.array([True, True, False, True]))
    allowed = scenario.replace(allow_unstable=True)
    qdq.ServerSplit(0.75).check_stable(allowed, np.array([True, True, False, True]))


def test_a_scenario_prints_briefly_and_escaped():
    scenario = qdq.Scenario(n_servers=4, arrivals=qdq.ArrivalTrace(np.arange(1000) * 0.5))
    assert "arrivals=ArrivalTrace(times=[0 ... 499.5], 1000 in all)" in repr(scenario)
    assert repr(qdq.ServiceTrace([2.0])) == "ServiceTrace(requirements=[2], 1 in all)"

    @numba.njit
    def first(queue_lengths, work, rates, candidates, u):
        return candidates[0]

    with pytest.warns(UserWarning, match="stability of a UserPolicy"):
        policy = qdq.UserPolicy(first)
    page = scenario.replace(control=policy)._repr_html_()
    assert "&lt;function" in page
    assert "<function" not in page
