"""Estimates by scores of the servers chosen, against enumeration and small chains."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

import qdq
from qdq import kernels, score
from qdq.exact import small_chain

Z = 4.0  # standard errors; a false alarm has probability 6e-5 a comparison


@njit
def to_the_second(queue_lengths, work, rates, candidates, u):
    return candidates[1]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    USER = qdq.UserPolicy(to_the_second)

POLICIES = {
    "random": qdq.PowerOfD(1),
    "two": qdq.PowerOfD(2),
    "three": qdq.PowerOfD(3),
    "shortest": qdq.JoinShortestQueue(),
    "idle": qdq.JoinIdleQueue(),
    "work": qdq.LeastWorkLeft(),
    "delay": qdq.ShortestExpectedDelay(2),
}
UNEQUAL = (0.8, 1.5, 0.8, 1.1)


def scenario_of(control, treatment, **changes):
    values = {"n_servers": 4, "arrivals": qdq.Poisson(0.6), "control": control}
    return qdq.Scenario(**(values | {"treatment": treatment} | changes))


def outside(log, **changes):
    """Return the log with nothing known but its columns and propensity."""
    nothing = {"scenario": None, "seed": None, "warm_up": None, "design": None}
    return dataclasses.replace(log, carried_over=np.empty((0, 3)), **(nothing | changes))


def look(log, control=None, treatment=None, n_servers=None, service=None, method="dq_score"):
    return score._look(log, method, control, treatment, n_servers, service)


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------


def enumerated(numbers, d):
    """Probability of each server, by all sets of d candidates in all their orders."""
    chance = np.zeros(len(numbers))
    orders = list(itertools.permutations(range(len(numbers)), d))
    for order in orders:
        chance[min(order, key=lambda s: numbers[s])] += 1.0 / len(orders)  # the first of the tied
    return chance


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_the_probability_of_a_choice_is_that_of_all_candidates(numbers, data):
    d = data.draw(st.integers(1, len(numbers)))
    values = np.array(numbers)
    ranks = np.array([[(values > v).sum(), (values == v).sum()] for v in values])
    found = score._choice_probability(ranks, d, values.size)
    np.testing.assert_allclose(found, enumerated(numbers, d), rtol=0, atol=1e-12)
    assert found.sum() == pytest.approx(1.0, abs=1e-12)


def compared(policy, lengths, work, rates):
    """Return the numbers of which a policy takes the least, and of how many servers."""
    if isinstance(policy, qdq.ShortestExpectedDelay):
        return (lengths + 1) / rates, policy.d
    if isinstance(policy, qdq.PowerOfD):
        return lengths, policy.d
    if isinstance(policy, qdq.LeastWorkLeft):
        return work, lengths.size
    return (np.minimum(lengths, 1) if isinstance(policy, qdq.JoinIdleQueue) else lengths), 4


@pytest.mark.parametrize(
    ("control", "treatment"),
    [*itertools.pairwise(POLICIES), ("work", "two"), ("delay", "random")],
)
def test_scores_are_those_of_the_choices_enumerated(control, treatment):
    scenario = scenario_of(POLICIES[control], POLICIES[treatment], service_rates=UNEQUAL)
    p = 0.3
    log = qdq.simulate(
        scenario, qdq.Bernoulli(p), 150, seed=3, warm_up=0.0, record=["queue_lengths"]
    )
    expected = np.empty(log.n_tasks)
    for i in range(log.n_tasks):
        work = np.zeros(4)
        for s in range(4):
            earlier = log.departure[:i][log.server[:i] == s]
            work[s] = max(earlier.max(initial=0.0) - log.arrival[i], 0.0)
        lengths = log.queue_lengths[i]
        pi0, pi1 = (
            enumerated(*compared(policy, lengths, work, scenario.rates))[log.server[i]]
            for policy in (scenario.control, scenario.treatment)
        )
        expected[i] = (pi1 - pi0) / (p * pi1 + (1 - p) * pi0)
    assert np.ptp(expected) > 0.1
    for known in (log, dataclasses.replace(log, queue_lengths=None)):
        np.testing.assert_allclose(look(known).score, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("delays", [(0.0, 0.0), (0.7, 0.0), (0.0, 0.4), (0.5, 0.3)])
def test_queues_are_rebuilt_as_the_dispatcher_saw_them(delays, own):
    # When the tasks of a warm-up came is not in the log, which matters with a delay only.
    warm_up = 50.0 if delays == (0.0, 0.0) else 0.0
    scenario = scenario_of(
        qdq.PowerOfD(2),
        qdq.PowerOfD(3),
        information_delay=delays[0],
        dispatch_delay=delays[1],
        counts_own_dispatches=own,
    )
    record = ["queue_lengths", "in_system"]
    log = qdq.simulate(scenario, qdq.Bernoulli(), 2000, seed=5, warm_up=warm_up, record=record)
    rebuilt = look(dataclasses.replace(log, queue_lengths=None))
    np.testing.assert_array_equal(rebuilt.score, look(log).score)
    np.testing.assert_array_equal(rebuilt.state[:, 0], log.in_system)


def test_the_state_met_is_that_of_the_recorded_queues():
    scenario = scenario_of(qdq.PowerOfD(1), qdq.PowerOfD(2), service_rates=UNEQUAL)
    record = ["queue_lengths", "service_time"]
    log = qdq.simulate(scenario, qdq.Bernoulli(), 500, seed=8, record=record)
    met = look(dataclasses.replace(log, queue_lengths=None, service_time=None))
    seen = log.queue_lengths
    row = np.arange(log.n_tasks)
    np.testing.assert_array_equal(met.state[:, 1], (seen > 0).sum(axis=1))
    np.testing.assert_array_equal(met.state[:, 2], (seen > 1).sum(axis=1))
    np.testing.assert_array_equal(met.state[:, 3], (seen**2).sum(axis=1))
    np.testing.assert_array_equal(met.state[:, 4], seen[row, log.server])
    np.testing.assert_allclose(met.state[:, 7], (seen > 0) @ scenario.rates)
    np.testing.assert_allclose(met.service_time, log.service_time, rtol=0, atol=1e-9)
    # The work at the server joined is what the task waits for.
    free = np.full(4, -np.inf)
    np.maximum.at(free, log.carried_over[:, 0].astype(int), log.carried_over[:, 2])
    for i in range(log.n_tasks):
        work = np.maximum(free - log.arrival[i], 0.0)
        expected = work.sum(), (work**2).sum(), work @ scenario.rates
        np.testing.assert_allclose(met.state[i, [5, 6, 8]], expected, rtol=1e-9, atol=1e-12)
        free[log.server[i]] = log.departure[i]


def test_scores_by_recorded_choices():
    scenario = scenario_of(qdq.PowerOfD(2), qdq.JoinShortestQueue())
    log = qdq.simulate(scenario, qdq.Bernoulli(0.3), 400, seed=2, record=["choices"])
    a, b, s = log.choice_control, log.choice_treatment, log.server
    expected = np.where(a == b, 0.0, np.where(s == b, 1 / 0.3, -1 / 0.7))
    assert 0.1 < np.mean(a == b) < 0.9
    # Where a log from outside has no queues as they were seen, or a policy is the user's.
    bare = outside(log, propensity=0.3)
    for policies in ((scenario.control, scenario.treatment), (qdq.PowerOfD(2), USER)):
        np.testing.assert_allclose(look(bare, *policies).score, expected, rtol=1e-12)
    # Ranks say more: their scores are the means of these.
    by_rank = look(log).score
    assert by_rank.std() < 0.8 * expected.std()


def test_round_robin_keeps_the_score_of_the_arm():
    scenario = scenario_of(qdq.RoundRobin(), qdq.PowerOfD(2))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.3), 100, seed=2)
    expected = np.where(log.treated, 1 / 0.3, -1 / 0.7)
    np.testing.assert_allclose(look(log).score, expected, rtol=1e-12)


def test_compiled_kernel_equals_its_python_bit_for_bit():
    scenario = scenario_of(
        qdq.ShortestExpectedDelay(2), qdq.LeastWorkLeft(), service_rates=UNEQUAL, n_servers=4
    )
    log = qdq.simulate(scenario, qdq.Bernoulli(), 300, seed=4)
    before = log.carried_over
    departure = np.concatenate((before[:, 2], log.departure))
    results = []
    for kernel in (kernels.queues_met, kernels.queues_met.py_func):
        ranks, state = np.zeros((300, 2, 2), np.int64), np.zeros((300, 9))
        kernel(
            np.concatenate((np.full(len(before), -np.inf), log.arrival)),
            departure,
            np.concatenate((before[:, 0].astype(np.int32), log.server)),
            np.argsort(departure, kind="stable"),
            len(before),
            0.1,
            0.2,
            False,
            np.zeros((0, 4), np.int32),
            np.array([kernels.SHORTEST_EXPECTED_DELAY, kernels.LEAST_WORK_LEFT]),
            scenario.rates,
            ranks,
            state,
        )
        results.append((ranks.tobytes(), state.tobytes()))
    assert results[0] == results[1]


# --------------------------------------------------------------------------------------------------
# Expectations
# --------------------------------------------------------------------------------------------------

CELLS = {
    "two servers": (
        qdq.Scenario(
            n_servers=2,
            arrivals=qdq.Poisson(0.6),
            control=qdq.PowerOfD(1),
            treatment=qdq.PowerOfD(2),
        ),
        0.5,
        20,
    ),
    "unequal rates, p = 0.3": (
        qdq.Scenario(
            n_servers=2,
            arrivals=qdq.Poisson(0.5),
            service_rates=[0.8, 1.4],
            control=qdq.PowerOfD(1),
            treatment=qdq.ShortestExpectedDelay(2),
        ),
        0.3,
        5,
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_expectations_are_those_of_small_chains(name):
    scenario, p, horizon = CELLS[name]
    chain = small_chain(scenario, p)
    expected = chain.expected_dq_response(horizon)
    calls = {
        "with service": lambda log: qdq.dq_score(log, horizon=horizon),
        "without": lambda log: qdq.dq_score(log, horizon=horizon, service=False),
        "value function": lambda log: qdq.lstd_dq(log),
        "value function after 30": lambda log: qdq.lstd_dq(log, horizon=30),
    }
    estimates = {call: [] for call in calls}
    plain = []
    for j in range(24):
        log = qdq.simulate(scenario, qdq.Bernoulli(p), 20_000, seed=(91, j))
        plain.append(qdq.dq_response(log, horizon=horizon, variance="score").value)
        for call, function in calls.items():
            estimates[call].append(function(log))
    for call, found in estimates.items():
        values = np.array([estimate.value for estimate in found])
        error = values.std(ddof=1) / math.sqrt(values.size)
        right = chain.slope() if call.startswith("value") else expected
        # The features span the value function to within a hundredth or so.
        misfit = 0.02 * abs(right) if call == "value function" else 0.0
        assert abs(values.mean() - right) < Z * error + misfit, call
        # Small enough to tell it from the direct effect, or at least from none.
        wrong = 0.0 if call == "without" else chain.direct_effect()
        assert abs(right - wrong) > 2 * Z * error, call
        # Standard errors: 4 standard deviations of a variance with 23 degrees of freedom.
        claimed = np.mean([estimate.standard_error**2 for estimate in found])
        assert abs(claimed / values.var(ddof=1) - 1) < 4 * math.sqrt(2 / 23) + 0.1, call
        if not call.startswith("value"):
            assert values.var() < 0.7 * np.var(plain), call


def plain_lstd(log, p):
    """LSTD-DQ by its definition, by recorded queues, with no part of chance taken off."""
    lengths = log.queue_lengths.astype(float)
    q, busy, two = lengths.sum(1), (lengths > 0).sum(1), (lengths > 1).sum(1)
    phi = np.column_stack((q, q**2, busy, busy**2, two, (lengths**2).sum(1)))
    phi -= phi.mean(axis=0)
    gap = np.diff(log.arrival)
    gap -= gap.mean()
    here, after = phi[:-1], phi[1:]
    chance = gap[:, None] * np.column_stack((np.ones(gap.size), here))
    after = after - chance @ np.linalg.lstsq(chance, after - here, rcond=None)[0]
    cost = log.response_time[:-1]
    rho = cost.mean()
    w = np.linalg.lstsq(here.T @ (here - after), here.T @ (cost - rho), rcond=None)[0]
    h = look(log).score[:-1]
    return np.mean(h * (cost - rho + after @ w - here @ w))


def test_lstd_is_as_defined():
    scenario = scenario_of(qdq.PowerOfD(1), qdq.PowerOfD(2))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.4), 5000, seed=6, record=["queue_lengths"])
    found = qdq.lstd_dq(log, service=False).value
    assert found == pytest.approx(plain_lstd(log, 0.4), rel=1e-6)


# --------------------------------------------------------------------------------------------------
# What must not matter
# --------------------------------------------------------------------------------------------------

METHODS = {"dq_score": qdq.dq_score, "lstd_dq": qdq.lstd_dq}


@pytest.fixture(scope="module")
def log():
    """A log from outside, of equal servers."""
    scenario = scenario_of(qdq.PowerOfD(1), qdq.PowerOfD(2))
    simulated = qdq.simulate(scenario, qdq.Bernoulli(), 20_000, seed=11)
    return outside(simulated, propensity=0.5)


def values_of(log, method, **options):
    estimate = METHODS[method](log, qdq.PowerOfD(1), qdq.PowerOfD(2), horizon=20, **options)
    return np.array([estimate.value, estimate.standard_error])


@pytest.mark.parametrize("method", METHODS)
def test_names_of_servers_do_not_matter(log, method):
    renamed = np.array([2, 0, 3, 1], dtype=np.int32)[log.server]
    expected = values_of(log, method)
    found = values_of(dataclasses.replace(log, server=renamed), method)
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    with pytest.warns(UserWarning, match="taken to be 4, as many as occur"):
        found = values_of(dataclasses.replace(log, server=10 * renamed, n_servers=None), method)
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    found = values_of(
        dataclasses.replace(log, server=10 * renamed, n_servers=None), method, n_servers=4
    )
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_estimates_scale_with_time(log, method):
    times = {"arrival": 1000.0 * log.arrival, "departure": 1000.0 * log.departure}
    found = values_of(dataclasses.replace(log, **times), method)
    np.testing.assert_allclose(found, 1000.0 * values_of(log, method), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_log_from_outside_is_as_the_simulated_one(method):
    scenario = scenario_of(qdq.PowerOfD(1), qdq.PowerOfD(2))
    log = qdq.simulate(scenario, qdq.Bernoulli(), 20_000, seed=11, warm_up=0.0)
    found = values_of(outside(log, propensity=0.5), method)
    np.testing.assert_allclose(found, values_of(log, method), rtol=1e-9)


def test_blocks_do_not_matter(log, monkeypatch):
    expected = values_of(log, "dq_score")
    monkeypatch.setattr(score, "_ROWS", 777)
    np.testing.assert_allclose(values_of(log, "dq_score"), expected, rtol=1e-9)
    monkeypatch.setattr(score, "MOST_BLOCKS", 100)
    assert values_of(log, "dq_score")[0] == pytest.approx(expected[0], rel=1e-9)
    for method in METHODS:
        found = {way: values_of(log, method, variance=way) for way in qdq.estimators.VARIANCES}
        assert len({value for value, _ in found.values()}) == 1
        errors = np.array([error for _, error in found.values()])
        assert errors.max() < 1.5 * errors.min()  # four ways to estimate the same


def test_the_jackknife_of_a_mean_is_batch_means_by_hand(log):
    met = look(log, qdq.PowerOfD(1), qdq.PowerOfD(2))
    response = score._window_sums(log.response_time, 20)[:-1]
    rest = score._without_regression(response, score._terms(log, met, 20), 20)
    u = met.score[:-20] * rest
    value, error = values_of(log, "dq_score", variance="batch_means")
    assert value == pytest.approx(u.mean())
    blocks = np.add.reduceat(u - u.mean(), np.arange(0, u.size, 128 * 5))
    share = np.diff([*range(0, u.size, 128 * 5), u.size]) / u.size
    expected = math.sqrt(np.sum(blocks**2) / (1 - np.sum(share**2))) / u.size
    assert error == pytest.approx(expected, rel=1e-9)


def test_tasks_before_skip_open_no_window(log):
    skip = float(log.arrival[3000] - log.arrival[0])
    later = dataclasses.replace(log, skip=skip)
    for method, windows in (("dq_score", 17_000 - 20), ("lstd_dq", 17_000 - 20)):
        found = METHODS[method](later, qdq.PowerOfD(1), qdq.PowerOfD(2), horizon=20)
        assert found.n_used == windows
        assert found.value != values_of(log, method)[0]


# --------------------------------------------------------------------------------------------------
# The regression
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [1.0, UNEQUAL])
def test_no_term_of_a_window_knows_the_arm_of_its_task(rates):
    scenario = scenario_of(qdq.PowerOfD(1), qdq.PowerOfD(3), service_rates=rates)
    log = qdq.simulate(scenario, qdq.Bernoulli(), 3000, seed=7, record=["choices"])
    differ = np.flatnonzero(log.choice_control != log.choice_treatment)
    span = 40
    told = 0
    for i in differ[differ > 500][:5]:
        treated = log.treated.copy()
        treated[i] ^= True
        other = qdq.replay(scenario, log, treated)
        assert other.server[i] != log.server[i]
        before, after = (
            score._beyond_influence(each, look(each, service=True), span)[0]
            for each in (log, other)
        )
        assert "R40" in before
        assert ("capacity" in before) == (rates is UNEQUAL)
        for name, values in before.items():
            # Requirements are rebuilt, and centred by their mean, to within rounding.
            np.testing.assert_allclose(after[name][i], values[i], rtol=0, atol=1e-8)
        # What a task does influence is the states of the next ones, and the outcome.
        told += np.any(before["V squares"][i + 1 : i + 9] != after["V squares"][i + 1 : i + 9])
        sums = [score._window_sums(each.response_time, span)[i] for each in (log, other)]
        assert sums[0] != sums[1]
    assert told == 5


def test_the_fit_of_a_tenth_leaves_it_out():
    rng = np.random.default_rng(1)
    m, span = 1000, 7
    x, y = rng.normal(size=(2, m))
    terms = score._Terms({"x": x}, [(), ("x",)])
    found = score._without_regression(y, terms, span)
    matrix = np.column_stack((np.ones(m), x))
    for fold in range(10):
        mine = np.arange(100 * fold, 100 * (fold + 1))
        away = np.ones(m, bool)
        away[max(mine[0] - span, 0) : mine[-1] + 1 + span] = False
        b = np.linalg.lstsq(matrix[away], y[away], rcond=None)[0]
        np.testing.assert_allclose(found[mine], y[mine] - matrix[mine] @ b, atol=1e-10)


def test_a_short_log_gets_few_terms(log):
    met = look(log, qdq.PowerOfD(1), qdq.PowerOfD(2))
    for span, most in ((20, 48), (100, 39), (900, 4), (3000, 1)):
        products = score._terms(log, met, span).products
        assert len(products) == most
        assert products[0] == ()
    with pytest.warns(UserWarning, match="dq_score has 0 windows side by side"):
        short = qdq.dq_score(log, qdq.PowerOfD(1), qdq.PowerOfD(2), horizon=19_000)
    assert math.isfinite(short.standard_error)


# --------------------------------------------------------------------------------------------------
# Requirements
# --------------------------------------------------------------------------------------------------


def fcfs_log(service_of, n=8_000, seed=3):
    """Two servers joined at random, or the shorter one; service by what is found there."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.8, n))
    treated = rng.random(n) < 0.5
    server, departure = np.zeros(n, np.int32), np.zeros(n)
    ends = [[0.0], [0.0]]
    previous = 1.0
    for i in range(n):
        lengths = [sum(d > arrival[i] for d in queue[-50:]) for queue in ends]
        s = int(rng.random() < 0.5)
        if treated[i] and lengths[0] != lengths[1]:
            s = int(lengths[1] < lengths[0])
        previous = service_of(rng, lengths[s], treated[i], previous)
        departure[i] = max(arrival[i], ends[s][-1]) + previous
        ends[s].append(departure[i])
        server[i] = s
    return qdq.TaskLog(
        arrival=arrival,
        departure=departure,
        treated=treated,
        server=server,
        n_servers=2,
        propensity=0.5,
    )


@pytest.mark.parametrize(
    ("service_of", "exogenous"),
    [
        (lambda rng, length, arm, previous: rng.exponential(), True),
        (lambda rng, length, arm, previous: rng.exponential() / (1 + 0.3 * length), False),
        (lambda rng, length, arm, previous: rng.exponential() * (1 + 0.4 * arm), False),
        (lambda rng, length, arm, previous: rng.exponential() * (0.8 + 0.2 * previous), False),
        (lambda rng, length, arm, previous: 1.0, True),
    ],
)
def test_requirements_are_used_only_if_they_are_exogenous(service_of, exogenous):
    log = fcfs_log(service_of)
    policies = qdq.PowerOfD(1), qdq.PowerOfD(2)
    assert look(log, *policies).uses_service == exogenous
    assert look(log, *policies, service=True).uses_service
    assert not look(log, *policies, service=False).uses_service
    default = qdq.dq_score(log, *policies, horizon=20).value
    given = qdq.dq_score(log, *policies, horizon=20, service=exogenous).value
    assert default == given


def test_other_disciplines_have_no_requirements_unless_recorded(log):
    # Tasks of a server that change places.
    first = log.departure.copy()
    for s in range(4):
        mine = np.flatnonzero(log.server == s)
        swap = mine[: mine.size // 2 * 2].reshape(-1, 2)
        swap = swap[log.arrival[swap].max(axis=1) < log.departure[swap].min(axis=1)]
        first[swap] = first[swap[:, ::-1]]
    overtaking = dataclasses.replace(log, departure=first)
    policies = qdq.PowerOfD(1), qdq.PowerOfD(2)
    assert not look(overtaking, *policies).uses_service
    with pytest.raises(ValueError, match="service=True needs the column service_time, or FCFS"):
        qdq.dq_score(overtaking, *policies, horizon=20, service=True)
    with pytest.raises(ValueError, match="horizon=None needs a scenario, service times or FCFS"):
        qdq.dq_score(overtaking, *policies)
    recorded = dataclasses.replace(
        overtaking, service_time=np.random.default_rng(0).exponential(size=log.n_tasks)
    )
    met = look(recorded, *policies)
    assert met.uses_service
    assert "V" not in score._beyond_influence(recorded, met, 20)[0]
    assert not look(recorded, *policies, method="lstd_dq").uses_service
    with pytest.raises(ValueError, match="service=True needs FCFS servers"):
        qdq.lstd_dq(recorded, *policies, service=True)


def test_rates_are_found_where_they_differ():
    scenario = scenario_of(qdq.PowerOfD(1), qdq.PowerOfD(2), service_rates=UNEQUAL)
    log = outside(qdq.simulate(scenario, qdq.Bernoulli(), 40_000, seed=2), propensity=0.5)
    found = look(log, scenario.control, scenario.treatment).rates
    np.testing.assert_allclose(found / found[0], scenario.rates / 0.8, rtol=0.06)
    equal = scenario.replace(service_rates=1.0)
    log = outside(qdq.simulate(equal, qdq.Bernoulli(), 40_000, seed=2), propensity=0.5)
    assert not look(log, equal.control, equal.treatment).unequal


# --------------------------------------------------------------------------------------------------
# Defaults and refusals
# --------------------------------------------------------------------------------------------------


def test_default_horizons(log):
    scenario = scenario_of(qdq.PowerOfD(1), qdq.PowerOfD(2))
    simulated = qdq.simulate(scenario, qdq.Bernoulli(), 5000, seed=1)
    assert qdq.dq_score(simulated).horizon == scenario.default_horizon
    assert qdq.lstd_dq(simulated).horizon == 1
    rate = (log.n_tasks - 1) / (log.arrival[-1] - log.arrival[0])
    mean = look(log, qdq.PowerOfD(1), qdq.PowerOfD(2)).service_time.mean()
    found = qdq.dq_score(log, qdq.PowerOfD(1), qdq.PowerOfD(2))
    assert found.horizon == math.floor(30 * rate * mean)
    assert found.method == "dq_score"
    assert found.variance == "hac"
    assert list(found.to_frame()["method"]) == ["dq_score"]


def test_equal_policies_have_no_effect():
    scenario = scenario_of(qdq.PowerOfD(2), qdq.PowerOfD(2))
    log = qdq.simulate(scenario, qdq.Bernoulli(), 3000, seed=1)
    for method in METHODS.values():
        found = method(log, horizon=20)
        assert found.value == 0.0
        assert found.standard_error == 0.0


def test_warns_of_choices_that_the_policies_would_not_make(log):
    with pytest.warns(UserWarning, match=r"\d % of the tasks joined servers to which JoinShort"):
        qdq.dq_score(log, qdq.JoinShortestQueue(), qdq.PowerOfD(2), horizon=20)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"information_delay": 0.5}, "with a delay"),
        ({"arrivals": qdq.Periodic(0.5, 0.5, 50.0)}, "with a periodic rate"),
    ],
)
def test_warns_where_the_queues_are_no_state(changes, why):
    scenario = scenario_of(qdq.PowerOfD(1), qdq.PowerOfD(2), **changes)
    log = qdq.simulate(scenario, qdq.Bernoulli(), 3000, seed=1)
    with pytest.warns(UserWarning, match=f"^{why}.*use dq_score"):
        qdq.lstd_dq(log)


def small(**changes):
    columns = {
        "arrival": np.arange(10.0),
        "departure": np.arange(10.0) + 0.5,
        "treated": np.arange(10) % 2 == 1,
        "server": np.arange(10) // 2 % 2,
        "n_servers": 2,
    }
    return qdq.TaskLog(**(columns | changes))


ONE, TWO = qdq.PowerOfD(1), qdq.PowerOfD(2)
REFUSALS = {
    "no log": (lambda: qdq.dq_score(3), TypeError, "log is a int"),
    "no server": (lambda: qdq.dq_score(small(server=None), ONE, TWO), ValueError, "column server"),
    "design": (
        lambda: qdq.lstd_dq(small(design=qdq.Switchback(2.0)), ONE, TWO),
        ValueError,
        r"lstd_dq needs a log of design Bernoulli, and this one is of design Switchback",
    ),
    "period": (
        lambda: qdq.dq_score(small(period=np.arange(10)), ONE, TWO),
        ValueError,
        "column period",
    ),
    "no policy": (lambda: qdq.dq_score(small(), ONE), ValueError, "^treatment=None is not allowed"),
    "not a policy": (lambda: qdq.dq_score(small(), ONE, 2), TypeError, "^treatment=2 is not a pol"),
    "too many": (
        lambda: qdq.dq_score(small(), ONE, qdq.PowerOfD(3)),
        ValueError,
        r"treatment=PowerOfD\(d=3\) samples more servers than there are: d must be at most 2",
    ),
    "other policies": (
        lambda: qdq.dq_score(qdq.simulate(qdq.Scenario(), qdq.Bernoulli(), 9, seed=1), ONE),
        ValueError,
        r"control must be what routed the log, PowerOfD\(d=2\)",
    ),
    "few servers": (
        lambda: qdq.dq_score(small(n_servers=None), ONE, TWO, n_servers=1),
        ValueError,
        "n_servers must be at least 2, as many as occur",
    ),
    "other servers": (
        lambda: qdq.dq_score(small(), ONE, TWO, n_servers=3),
        ValueError,
        "n_servers must be the log's own, 2",
    ),
    "one arm": (
        lambda: qdq.dq_score(small(treated=np.ones(10, bool)), ONE, TWO),
        ValueError,
        "none of the 10 counted tasks is control: dq_score needs both arms",
    ),
    "long": (
        lambda: qdq.dq_score(small(), ONE, TWO, horizon=10),
        ValueError,
        "horizon=10 is not allowed",
    ),
    "rule": (
        lambda: qdq.dq_score(small(), ONE, TWO, horizon="rmse"),
        ValueError,
        "horizon='rmse' is not allowed",
    ),
    "default too long": (
        lambda: qdq.dq_score(small(), ONE, TWO),
        ValueError,
        "horizon=None means 15 for this log",
    ),
    "long steps": (
        lambda: qdq.lstd_dq(small(), ONE, TWO, horizon=10),
        ValueError,
        "horizon=10 is not allowed",
    ),
    "level": (lambda: qdq.dq_score(small(), ONE, TWO, level=95), ValueError, "level=95"),
    "variance": (
        lambda: qdq.dq_score(small(), ONE, TWO, variance="iid"),
        ValueError,
        "variance='iid' is not allowed",
    ),
    "service": (lambda: qdq.dq_score(small(), ONE, TWO, service=1), TypeError, "service=1"),
    "user": (
        lambda: qdq.dq_score(small(), ONE, USER, horizon=2),
        ValueError,
        "can't be had for UserPolicy.*needs the columns choice_control and choice_treatment",
    ),
    "delayed work": (
        lambda: qdq.dq_score(
            qdq.simulate(
                scenario_of(ONE, qdq.LeastWorkLeft(), information_delay=1.0),
                qdq.Bernoulli(),
                500,
                seed=1,
            )
        ),
        ValueError,
        r"can't be had for LeastWorkLeft\(\), which sees work that the log does not show",
    ),
    "unknown rates": (
        lambda: qdq.dq_score(
            outside(
                qdq.simulate(
                    scenario_of(ONE, qdq.ShortestExpectedDelay(2), service_rates=UNEQUAL),
                    qdq.Bernoulli(),
                    20_000,
                    seed=1,
                )
            ),
            ONE,
            qdq.ShortestExpectedDelay(2),
        ),
        ValueError,
        "which compares service rates that differ and are not known",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    call, kind, message = REFUSALS[case]
    with pytest.raises(kind, match=message):
        call()


def test_ranks_are_preferred_to_recorded_choices_where_candidates_confirm_them():
    scenario = qdq.Scenario(
        n_servers=6,
        arrivals=qdq.Poisson(0.7),
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(2),
    )
    nothing = {"scenario": None, "seed": None, "warm_up": None, "design": None}

    def errors(scenario):
        log = qdq.simulate(
            scenario, qdq.Bernoulli(), 20_000, seed=3, warm_up=0.0, record=["choices", "candidates"]
        )
        log = dataclasses.replace(log, **nothing)
        plain = dataclasses.replace(log, choice_control=None, choice_treatment=None)
        bare = dataclasses.replace(log, candidates=None)
        policies = {"control": scenario.control, "treatment": scenario.treatment}
        return [
            qdq.dq_score(x, **policies, horizon=80, service=False).standard_error
            for x in (log, plain, bare)
        ]

    own, by_rank, by_choice = errors(scenario)
    assert own == by_rank
    assert by_rank < 0.8 * by_choice
    # With a delay that the log does not tell of the rebuilt queues are not those that were seen.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own, by_rank, by_choice = errors(scenario.replace(information_delay=1.0))
    assert own == by_choice
    assert own != by_rank
