"""The log twin: what is rebuilt exactly, what is fitted, and what the tests of fit see."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.testing import assert_allclose, assert_array_equal

import qdq
from qdq import figures, kernels, rebuild, twin
from qdq.simulate import run_traces, seed_sequence

ONE, TWO, THREE = (qdq.PowerOfD(d) for d in (1, 2, 3))
# Of which the effect is known exactly, by linear algebra.
PAIR = qdq.Scenario(n_servers=2, arrivals=qdq.Poisson(0.6), control=ONE, treatment=TWO)
SMALL = qdq.Scenario(n_servers=4, arrivals=qdq.Poisson(0.7), control=ONE, treatment=TWO)
Z = 4.5  # standard errors: a false alarm of 7e-6


def outside(log, **fields):
    """Return a simulated log as one from outside: without what only a simulation knows."""
    return replace(log, scenario=None, seed=None, warm_up=None, design=None, **fields)


def simulated(scenario=SMALL, n=30_000, seed=1, **options):
    return qdq.simulate(scenario, qdq.Bernoulli(0.5), n_tasks=n, seed=seed, **options)


def fitted(log, scenario=SMALL):
    who = rebuild.servers(log, scenario.n_servers, stacklevel=1)
    return twin._Fit(log, who, scenario.control, scenario.treatment, 0, "log_twin")


def failed(result):
    return {test.name for test in result.tests if not test.passed}


@pytest.fixture(scope="module")
def log():
    return simulated()


@pytest.fixture(scope="module")
def result(log):
    return qdq.log_twin(log, ONE, TWO)


# --------------------------------------------------------------------------------------------------
# Rebuilding requirements
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"service_rates": [0.5, 0.8, 1.2, 1.9], "arrivals": qdq.Poisson(0.45)},
        {"dispatch_delay": 0.4},
        {"dispatch_delay": 0.3, "information_delay": 0.5, "service": qdq.Pareto(2.5)},
    ],
    ids=["plain", "unequal rates", "dispatch delay", "both delays"],
)
def test_service_times_of_fcfs_servers_are_rebuilt(changes):
    scenario = SMALL.replace(**changes)
    log = simulated(scenario, record=("service_time",))
    assert len(log.carried_over) > 0  # the tasks of the warm-up count as ahead
    service = fitted(log, scenario).service(scenario.dispatch_delay)
    assert_allclose(service.time, log.service_time, rtol=0, atol=1e-9)
    # Rates are found to be equal or not, and to within the error of a mean of so many tasks.
    count = np.bincount(log.server)
    own = np.array([np.std(log.service_time[log.server == s]) for s in range(4)])
    error = own * scenario.rates**2 / np.sqrt(count)
    assert np.all(abs(service.rates.rate - scenario.rates) < Z * error)
    assert (np.ptp(service.rates.rate) == 0.0) == (np.ptp(scenario.rates) == 0.0)


def sharing_log(n=3_000, n_servers=4, rate=0.7, d=(1, 2), seed=1, order="sharing"):
    """Serve all tasks at once, the last one or the two oldest, in plain Python.

    Together they are served at the rate 1; at "two slots" each of the two is.
    """
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / (n_servers * rate), n))
    requirement = rng.exponential(size=n)
    treated = rng.random(n) < 0.5
    departure, server = np.empty(n), np.empty(n, np.int32)
    left = [{} for _ in range(n_servers)]  # what remains to be done, by task
    since = [0.0] * n_servers

    def advance(s, until):
        while left[s]:
            oldest = sorted(left[s])
            served = {"sharing": oldest, "last": oldest[-1:]}.get(order, oldest[:2])
            pace = 1.0 if order == "two slots" else 1.0 / len(served)
            first = min(served, key=left[s].get)
            ends = since[s] + left[s][first] / pace
            for k in served:
                left[s][k] -= (min(ends, until) - since[s]) * pace
            if ends > until:
                break
            departure[first], since[s] = ends, ends
            del left[s][first]
        since[s] = until

    for k in range(n):
        for s in range(n_servers):
            advance(s, arrival[k])
        sampled = rng.permutation(n_servers)[: d[int(treated[k])]]
        server[k] = min(sampled, key=lambda s: len(left[s]))
        left[server[k]][k] = requirement[k]
    for s in range(n_servers):
        advance(s, math.inf)
    log = qdq.TaskLog(
        arrival=arrival, departure=departure, treated=treated, server=server, n_servers=n_servers
    )
    return log, requirement


def shared(arrival, departure, server, n_servers):
    return kernels.service_under_sharing(
        arrival, departure, server, np.argsort(departure, kind="stable"), n_servers
    )


def test_service_times_of_sharing_servers_are_rebuilt():
    log, requirement = sharing_log()
    rebuilt = shared(log.arrival.copy(), log.departure.copy(), log.server.copy(), 4)
    assert_allclose(rebuilt, requirement, rtol=0, atol=1e-9)
    assert np.mean(log.departure - log.arrival) > 1.5 * requirement.mean()  # they did share
    # From the middle on, with those who are there as carried over.
    later = slice(1_500, None)
    there = np.flatnonzero(log.departure[:1_500] > log.arrival[1_500])
    assert there.size > 0
    part = qdq.TaskLog(
        **{k: getattr(log, k)[later] for k in ("arrival", "departure", "treated", "server")},
        carried_over=np.column_stack((log.server, log.arrival, log.departure))[there],
    )
    found = rebuild.shared_service(part, rebuild.servers(part, 4, stacklevel=1))
    assert_allclose(found, requirement[later], rtol=0, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=9
    )
)
def test_shared_service_is_the_integral_of_one_over_those_present(tasks):
    """Whole times, so that ties and tasks of no length are many, and sums over unit intervals."""
    tasks = sorted(tasks, key=lambda task: task[0])
    arrival = np.array([float(task[0]) for task in tasks])
    departure = arrival + [float(task[1]) for task in tasks]
    server = np.array([task[2] for task in tasks], np.int32)
    found = shared(arrival, departure, server, 2)
    for k in range(len(tasks)):
        exact = Fraction(0)
        for t in range(int(arrival[k]), int(departure[k])):
            exact += Fraction(
                1, int(np.sum((arrival <= t) & (departure > t) & (server == server[k])))
            )
        assert found[k] == pytest.approx(float(exact), abs=1e-12)


def test_the_kernel_is_its_plain_function():
    log, _ = sharing_log(n=300)
    order = np.argsort(log.departure, kind="stable")
    arguments = (log.arrival.copy(), log.departure.copy(), log.server.copy(), order, 4)
    assert_array_equal(
        kernels.service_under_sharing(*arguments),
        getattr(kernels.service_under_sharing, "py_func", kernels.service_under_sharing)(
            *arguments
        ),
    )


def test_queues_at_joining_are_those_that_are_there():
    scenario = SMALL.replace(dispatch_delay=0.3)
    log = simulated(scenario, n=3_000, warm_up=0.0)
    joined = log.arrival + 0.3
    there = log.departure[None, :] > joined[:, None]
    there &= (log.server[None, :] == log.server[:, None]) & np.tri(3_000, k=-1, dtype=bool)
    assert_array_equal(fitted(log, scenario).queue_at_joining(0.3), there.sum(axis=1))


# --------------------------------------------------------------------------------------------------
# The twin as the log was
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"service_rates": [0.5, 0.8, 1.2, 1.9], "arrivals": qdq.Poisson(0.45)},
        {"information_delay": 0.7, "dispatch_delay": 0.25},
        {"treatment": qdq.ShortestExpectedDelay(3)},
        {"control": qdq.RoundRobin()},
        {"arrivals": qdq.Poisson(0.95)},
        {"arrivals": qdq.Poisson(0.95), "information_delay": 0.7, "dispatch_delay": 0.25},
    ],
    ids=[
        "plain",
        "unequal rates",
        "delays",
        "expected delay",
        "round robin",
        "high load",
        "high load, delays",
    ],
)
def test_with_the_logs_candidates_and_true_parameters_the_twin_is_the_log(changes):
    scenario = SMALL.replace(**changes)
    log = simulated(scenario, n=5_000, seed=2, record=("candidates",))
    fit = fitted(log, scenario)
    if scenario.load > 0.9:  # so that more tasks are there than a line of departures has room for
        there = log.departure[: fit.first] > log.arrival[fit.first]
        assert max(np.bincount(log.server[: fit.first][there])) > 8
    delays = twin._Delays(scenario.dispatch_delay, scenario.information_delay)
    run = fit.run(delays)
    assert_array_equal(run.server, log.server)
    assert_allclose(run.response, log.response_time, rtol=0, atol=1e-9)
    assert fit.misfit(run.response) < 1e-10
    assert fit.agreement(delays) == 1.0


def test_the_run_without_a_log_is_the_replay(log):
    scenario = fitted(log).scenario(twin._Delays(0.0, 0.1))
    arms = np.random.default_rng(1).random(log.n_tasks) < 0.3
    own = outside(log, carried_over=np.empty((0, 3)))
    own = replace(own, service_time=scenario.service.requirements / scenario.rates[own.server])
    replayed = qdq.replay(scenario, own, arms, seed=5)
    response, server = run_traces(scenario, arms, seed_sequence(5))
    assert_array_equal(server, replayed.server)
    assert_allclose(response, replayed.response_time, rtol=0, atol=1e-9)


def test_moments_and_their_covariance(log):
    fit = fitted(log)
    counted = np.arange(2_000, 29_500)
    assert_array_equal(counted, np.arange(30_000)[fit.counted])
    w = log.response_time / log.response_time.mean()
    scale = log.response_time.mean() / fit.unit

    def moments(rows):
        arms = w[rows][log.treated[rows]] * scale, w[rows][~log.treated[rows]] * scale
        logs = [0.5 * math.log(arm.var()) for arm in arms]
        quantiles = [float(np.quantile(w[rows] * scale, q)) for q in (0.02, 0.1, 0.5, 0.95)]
        return np.array([arms[0].mean(), arms[1].mean(), *logs, *quantiles])

    edges = np.linspace(2_000, 29_500, 25).astype(int)
    batches = np.array([moments(np.arange(a, b)) for a, b in pairwise(edges)])
    away = batches - batches.mean(axis=0)
    v = 2.0 * (away.T @ away) / 23.0 / 24.0
    v = 0.9 * v + 0.1 * np.diag(np.diag(v))
    m = moments(counted)
    v += np.diag((1e-3 * np.maximum(abs(m), 0.1)) ** 2)
    assert_allclose(fit.log_moments, m, rtol=1e-9, atol=1e-12)
    assert_allclose(np.linalg.inv(fit.weights), v, rtol=1e-6)
    response = fit.run(twin._Delays(0.0, 0.0)).response
    apart = fit.moments_of(response, fit.counted) - m
    assert fit.misfit(response) == pytest.approx(apart @ np.linalg.solve(v, apart), rel=1e-6)


# --------------------------------------------------------------------------------------------------
# Value and error
# --------------------------------------------------------------------------------------------------


def test_estimates_are_near_the_truth_and_by_as_much_as_they_say():
    truth = qdq.true_effect(PAIR).value
    assert truth == pytest.approx(-0.81822, abs=1e-5)
    logs = [simulated(PAIR, seed=(2, j)) for j in range(8)]
    found = [qdq.log_twin(log, ONE, TWO) for log in logs]
    assert all(one.trusted for one in found)
    error = math.sqrt(sum(one.standard_error**2 for one in found)) / 8
    assert abs(np.mean([one.value for one in found]) - truth) < Z * error
    # Which would find a twin out that missed a tenth of the effect, let alone the naive estimate.
    assert Z * error < 0.1 * abs(truth)
    naive = np.mean([qdq.naive(log).value for log in logs])
    assert abs(naive - truth) > Z * error
    # Chi-square with 7 degrees of freedom: false alarms of 1e-4 at either end.
    spread = np.var([one.value for one in found], ddof=1)
    ratio = 7 * spread / np.mean([one.standard_error**2 for one in found])
    assert 0.3 < ratio < 30.0


def test_the_variance_is_right_for_effects_of_blocks_crossed_in_two_ways():
    rng = np.random.default_rng(1)
    k, b = 4, 20
    sd = {"gaps": 1.0, "requirements": 2.0, "rest": 3.0}
    values, variances = [], []
    for _ in range(2_000):
        gaps, requirements = (
            rng.normal(size=b) * sd["gaps"],
            rng.normal(size=b) * sd["requirements"],
        )
        orders = np.array(
            [[np.arange(b)] * 2] + [[rng.permutation(b) for _ in range(2)] for _ in range(k - 1)]
        ).transpose(1, 0, 2)
        difference = (
            gaps[orders[0]] + requirements[orders[1]] + sd["rest"] * rng.normal(size=(k, b))
        )
        values.append(difference.mean())
        loads = twin.Loads(np.zeros(1), np.zeros(1))
        passes = twin._Passes(difference, difference, *orders, loads)
        variances.append(twin._crossed_variance(difference, passes))
    exact = (1.0 + 4.0 + 9.0 / k) / b
    error = np.std(variances) / math.sqrt(len(variances))
    assert abs(np.mean(variances) - exact) < Z * error
    assert Z * error < 0.05 * exact
    assert np.var(values) == pytest.approx(exact, rel=Z * math.sqrt(2.0 / 2_000))


def test_the_same_seed_gives_the_same_answer(log, result):
    assert qdq.log_twin(log, ONE, TWO, seed=0) == result
    other = qdq.log_twin(log, ONE, TWO, seed=3)
    assert 0.0 < abs(other.value - result.value) < 3.0 * result.standard_error


def test_nothing_is_taken_from_the_scenario_of_a_simulated_log(log, result):
    assert qdq.log_twin(outside(log), ONE, TWO) == result


def test_a_change_of_the_unit_of_time_changes_the_unit_only():
    scenario = SMALL.replace(information_delay=0.5, dispatch_delay=0.5)
    log = outside(simulated(scenario, n=12_000, warm_up=0.0))
    slow = replace(log, arrival=8.0 * log.arrival, departure=8.0 * log.departure)
    one, eight = (qdq.log_twin(x, ONE, TWO) for x in (log, slow))
    assert one.scenario.information_delay > 0.0  # so the search is compared too
    for name in ("value", "standard_error", "twin_value", "twin_standard_error"):
        assert getattr(eight, name) == pytest.approx(8.0 * getattr(one, name), rel=1e-6)
    for name in ("information_delay", "dispatch_delay"):
        found = getattr(eight.scenario, name)
        assert found == pytest.approx(8.0 * getattr(one.scenario, name), rel=1e-6)
    for a, b in zip(one.tests, eight.tests, strict=True):
        assert (a.name, a.passed) == (b.name, b.passed)
        assert a.value == pytest.approx(b.value, rel=1e-4, abs=1e-9)
    for a, b in zip(one.moments, eight.moments, strict=True):
        assert_allclose(np.array(b[1:]), 8.0 * np.array(a[1:]), rtol=1e-6)


# --------------------------------------------------------------------------------------------------
# Servers that share
# --------------------------------------------------------------------------------------------------


def test_a_twin_of_sharing_servers_is_near_the_truth():
    # With exponential requirements queues are those of FCFS servers in law, and so is the effect.
    truth = qdq.true_effect(PAIR).value
    scenario = PAIR.replace(discipline="processor_sharing")
    found = [qdq.log_twin(simulated(scenario, 20_000, (3, j)), ONE, TWO) for j in range(4)]
    assert all(one.trusted for one in found)
    assert all(one.scenario.discipline == "processor_sharing" for one in found)
    error = math.sqrt(sum(one.standard_error**2 for one in found)) / 4
    assert abs(np.mean([one.value for one in found]) - truth) < Z * error
    assert Z * error < 0.2 * abs(truth)


def test_sharing_servers_of_an_independent_simulation_pass():
    log, requirement = sharing_log(n=8_000)
    assert qdq.log_twin(log, ONE, TWO).trusted
    fit = fitted(log)
    rebuilt = fit.service(0.0).time
    assert_allclose(rebuilt, requirement, rtol=0, atol=1e-9)


def test_runs_at_sharing_servers_are_those_of_the_simulator():
    scenario = SMALL.replace(discipline="processor_sharing")
    log = simulated(scenario, n=6_000, seed=4, warm_up=0.0, record=("candidates", "service_time"))
    fit = fitted(log, scenario)
    assert fit.candidates is None  # to the end of its tasks a log has not all that slow them down
    run = fit.run(twin._Delays(0.0, 0.0))
    own = replace(outside(log), service_time=fit.service(0.0).time, candidates=None)
    fitted_scenario = fit.scenario(twin._Delays(0.0, 0.0))
    stream = fit.streams[0]
    again = qdq.replay(fitted_scenario, own, log.treated, (stream.entropy, *stream.spawn_key))
    assert_array_equal(run.server, again.server)
    assert_allclose(run.response, again.response_time, rtol=0, atol=1e-9)
    # With the log's candidates this system is the log, but for those still there at its end.
    same = qdq.replay(fitted_scenario, replace(own, candidates=log.candidates), log.treated)
    assert_array_equal(same.server[:5_500], log.server[:5_500])
    assert_allclose(same.response_time[:5_500], log.response_time[:5_500], rtol=0, atol=1e-6)


def test_what_comes_after_the_counted_tasks_slows_them_down_at_sharing_servers():
    scenario = SMALL.replace(discipline="processor_sharing")
    log = simulated(scenario, n=6_000, seed=4, warm_up=0.0)
    fit = fitted(log, scenario)
    passes = twin._passes(fit, twin._Delays(0.0, 0.0), TWO)
    zero, one = (run.response for run in fit.alone(twin._Delays(0.0, 0.0), TWO))
    assert one.size == log.n_tasks
    counted = slice(fit.stop - 20 * ((fit.stop - fit.first) // 20), fit.stop)
    blocks = (one - zero)[counted].reshape(20, -1).mean(axis=1)
    assert_allclose(passes.difference[0], blocks, rtol=1e-12)


# --------------------------------------------------------------------------------------------------
# Delays
# --------------------------------------------------------------------------------------------------


DELAYED = SMALL.replace(information_delay=0.6, dispatch_delay=0.4)


def test_delays_are_found_by_the_misfit():
    log = outside(simulated(DELAYED))
    found = qdq.log_twin(log, ONE, TWO)
    assert found.trusted
    # No service is longer than the response: the shortest one of so many is close to the delay.
    assert found.scenario.dispatch_delay == pytest.approx(0.4, abs=0.02)
    assert found.scenario.information_delay == pytest.approx(0.6, abs=0.25)
    without = fitted(log).misfit(fitted(log).run(twin._Delays(0.0, 0.0)).response)
    assert without > 100.0
    assert found.tests[0].value < 22.0
    truth = qdq.true_effect(DELAYED, relative_error=0.01)
    apart = abs(found.value - truth.value)
    assert apart < Z * math.hypot(found.standard_error, truth.standard_error)
    # The delays that are not known for sure count in the error.
    fit = fitted(log)
    delays = twin._Delays(0.4, 0.6, (True, True))
    effect, mean = twin._variances_from_delays(fit, delays, TWO)
    assert 0.0 < effect < found.twin_standard_error**2 * 4.0
    assert mean > 0.0
    known = delays._replace(fitted=(False, False))
    assert_array_equal(twin._variances_from_delays(fit, known, TWO), 0.0)


def test_delays_are_seen_in_a_log_with_candidates_and_service_times():
    log = simulated(DELAYED, n=10_000, warm_up=0.0, record=("candidates", "service_time"))
    found = qdq.log_twin(outside(log), ONE, TWO)
    assert found.scenario.dispatch_delay == pytest.approx(0.4, abs=1e-9)
    assert found.scenario.information_delay == pytest.approx(0.6, abs=0.01)
    assert found.trusted
    values = {test.name: test.value for test in found.tests}
    assert values["choices"] > 0.99
    assert values["responses"] < 0.01
    assert values["service_times"] < 1e-6


def test_without_service_times_candidates_show_both_delays():
    log = simulated(DELAYED, n=10_000, warm_up=0.0, record=("candidates",))
    found = qdq.log_twin(outside(log), ONE, TWO)
    assert found.scenario.dispatch_delay == pytest.approx(0.4, abs=0.02)
    assert found.scenario.information_delay == pytest.approx(0.6, abs=0.02)


# --------------------------------------------------------------------------------------------------
# Clocks in whole ticks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tick", [0.01, 0.04, 0.1])
@pytest.mark.parametrize("lengths", [False, True], ids=["floor of times", "floor of lengths"])
def test_a_log_in_whole_ticks_gives_what_that_of_full_precision_gives(log, result, tick, lengths):
    own = outside(log, carried_over=np.empty((0, 3)))
    arrival = np.floor(own.arrival / tick)
    length = np.floor(own.response_time / tick)
    departure = arrival + length if lengths else np.floor(own.departure / tick)
    order = np.lexsort((departure, arrival))  # as where lines are written at completion
    coarse = qdq.TaskLog(
        arrival=tick * arrival[order],
        departure=tick * departure[order],
        treated=own.treated[order],
        server=own.server[order],
        n_servers=4,
    )
    found = qdq.log_twin(coarse, ONE, TWO)
    assert found.trusted
    assert found.scenario.discipline == "fcfs"
    assert found.scenario.dispatch_delay == found.scenario.information_delay == 0.0
    assert abs(found.value - result.value) < 2.0 * found.standard_error
    # Half a tick of every length is in the error, and not more than it has to be.
    assert found.standard_error < 2.0 * result.standard_error


# --------------------------------------------------------------------------------------------------
# Tests of fit
# --------------------------------------------------------------------------------------------------


def test_a_correct_system_passes_all_tests(result):
    names = ["moments", "requirement_and_queue", "requirement_and_arm", "requirement_and_previous"]
    assert [test.name for test in result.tests] == [*names, "load"]
    assert result.trusted
    assert failed(result) == set()
    assert (result.value, result.standard_error) == (result.twin_value, result.twin_standard_error)
    assert result.scenario.information_delay == result.scenario.dispatch_delay == 0.0
    for moment in result.moments:
        assert abs(moment.twin - moment.log) < Z * math.hypot(moment.log_error, moment.twin_error)
    assert_allclose(result.loads, 0.7, atol=0.05)
    assert_allclose(result.by_queue.requirement[:3], 1.0, atol=0.06)


def queueing_log(
    n, slow, seed=1, n_servers=6, rate=0.55, d=(1, 3), wander=0.0, by_arm=1.0, share=0.5
):
    """FCFS servers that are slower by `slow` for each task met, in plain Python."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / (n_servers * rate), n))
    requirement = rng.exponential(size=n)
    mood = 0.0
    treated = rng.random(n) < share
    departure, server = np.empty(n), np.empty(n, np.int32)
    lines = [[] for _ in range(n_servers)]
    for k in range(n):
        for line in lines:
            while line and line[0] <= arrival[k]:
                line.pop(0)
        sampled = rng.permutation(n_servers)[: d[int(treated[k])]]
        s = min(sampled, key=lambda s: len(lines[s]))
        mood = 0.9 * mood + wander * rng.normal()
        service = requirement[k] * (1.0 + slow * min(len(lines[s]), 4)) * math.exp(mood)
        service *= by_arm if treated[k] else 1.0
        departure[k] = max(arrival[k], lines[s][-1] if lines[s] else 0.0) + service
        server[k] = s
        lines[s].append(departure[k])
    return qdq.TaskLog(
        arrival=arrival,
        departure=departure,
        treated=treated,
        server=server,
        n_servers=n_servers,
        propensity=share,
    )


def slope_of_queueing(slow, step=0.15):
    """Slope at one half of the mean response of `queueing_log` against the treated share."""
    low, high = (
        np.mean(
            [
                queueing_log(25_000, slow, seed=(7, s), share=share).response_time[2_000:].mean()
                for s in (0, 1)
            ]
        )
        for share in (0.5 - step, 0.5 + step)
    )
    return (high - low) / (2.0 * step)


def test_servers_of_an_independent_simulation_pass():
    found = qdq.log_twin(queueing_log(12_000, slow=0.0), ONE, THREE)
    assert found.trusted


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        ({"slow": 0.1}, "requirement_and_queue"),
        ({"slow": 0.0, "by_arm": 1.2}, "requirement_and_arm"),
        ({"slow": 0.0, "wander": 0.15}, "requirement_and_previous"),
    ],
)
def test_service_that_depends_on_something_is_seen(planted, seen):
    found = qdq.log_twin(queueing_log(12_000, **planted), ONE, THREE)
    assert not found.trusted
    assert seen in failed(found)


def test_an_unstable_control_is_seen_though_the_log_is_stable():
    scenario = qdq.Scenario(
        n_servers=4,
        arrivals=qdq.Poisson(0.7),
        service_rates=[0.6, 0.6, 1.4, 1.4],
        control=ONE,
        treatment=THREE,
        allow_unstable=True,
    )
    log = simulated(scenario, warm_up=300.0)
    found = qdq.log_twin(log, ONE, THREE)
    assert failed(found) == {"load"}
    assert_allclose(found.loads.control, 0.7 / scenario.rates, rtol=0.1)
    assert max(found.loads.treatment) < 1.0
    assert math.isnan(found.value)
    assert math.isnan(found.standard_error)
    assert "no steady state" in repr(found)
    assert "no finite effect" in repr(found)
    assert found.scenario.allow_unstable


def test_other_policies_than_those_of_the_log_are_seen(log):
    with pytest.warns(UserWarning, match="to which PowerOfD.* would not have sent them"):
        wrong = qdq.log_twin(log, TWO, THREE)
    assert "moments" in failed(wrong)
    assert not wrong.trusted


def test_candidates_show_policies_that_are_not_the_logs(log):
    scenario = SMALL.replace(control=TWO, treatment=THREE)
    own = simulated(scenario, record=("candidates",))
    assert qdq.log_twin(own, TWO, THREE).trusted
    found = qdq.log_twin(own, ONE, THREE)
    assert {"choices", "responses"} <= failed(found)


@pytest.mark.parametrize(("dispatch", "information"), [(0.0, 0.0), (0.4, 0.3), (0.0, 0.6)])
def test_candidates_show_delays_that_are_not_the_logs(dispatch, information):
    log = outside(simulated(DELAYED, n=10_000, warm_up=0.0, record=("candidates",)))
    fit = fitted(log)
    names = {t.name: t.passed for t in twin._tests_of_columns(fit, twin._Delays(0.4, 0.6))}
    assert names == {"responses": True, "choices": True}
    wrong = twin._tests_of_columns(fit, twin._Delays(dispatch, information))
    assert not any(test.passed for test in wrong)


def test_logged_service_times_that_departures_contradict_are_seen():
    own = simulated(record=("service_time",))
    paused = np.random.default_rng(1).random(own.n_tasks) < 0.05
    log = outside(own, carried_over=np.empty((0, 3)))
    log = replace(log, service_time=np.where(paused, 0.5, 1.0) * own.service_time)
    assert "service_times" in failed(qdq.log_twin(log, ONE, TWO))


def test_equal_requirements_are_not_tested_for_correlations():
    log = simulated(SMALL.replace(service=qdq.Deterministic()), n=10_000)
    found = qdq.log_twin(log, ONE, TWO)
    assert [test.name for test in found.tests] == ["moments", "load"]
    assert found.trusted


@pytest.mark.parametrize(
    "treatment", [qdq.JoinShortestQueue(), qdq.LeastWorkLeft(), qdq.JoinIdleQueue()], ids=repr
)
def test_policies_that_look_at_all_servers(treatment):
    # Candidates of the other arm do not tell how these policies break ties.
    log = simulated(SMALL.replace(treatment=treatment), n=10_000, record=("candidates",))
    found = qdq.log_twin(log, ONE, treatment)
    assert found.trusted
    assert found.value < -1.0


@pytest.mark.long  # a user's policy is compiled anew in every process
def test_a_policy_of_the_users_own():
    @njit
    def first(queue_lengths, work, rates, candidates, u):
        best = candidates[0]
        for s in candidates[:2]:
            if queue_lengths[s] < queue_lengths[best]:
                best = s
        return best

    with pytest.warns(UserWarning, match="stability of a UserPolicy"):
        policy = qdq.UserPolicy(first)
    log = simulated(n=10_000)
    assert qdq.log_twin(log, ONE, policy).value == qdq.log_twin(log, ONE, TWO).value


# --------------------------------------------------------------------------------------------------
# Where the twin is not trusted
# --------------------------------------------------------------------------------------------------


def test_the_fallback_is_the_twin_corrected_by_dq(log, result):
    found = result.fallback
    assert found.method == "dq_score"
    assert found.value == pytest.approx(result.twin_value + found.dq_log - found.dq_twin)
    rate = (log.n_tasks - 1) / (log.arrival[-1] - log.arrival[0])
    assert found.horizon == int(30.0 * rate * fitted(log).unit)
    assert found.horizon == pytest.approx(30.0 * 4 * 0.7, rel=0.05)
    # Its parts are those of the log between the ends that the twin leaves out.
    counted = slice(0, 29_500)
    columns = ("arrival", "departure", "treated", "server")
    part = qdq.TaskLog(
        **{name: getattr(log, name)[counted] for name in columns},
        propensity=0.5,
        n_servers=4,
        skip=log.arrival[2_000] - log.arrival[0],
    )
    for own, service in zip(result.scores, (False, True), strict=True):
        other = qdq.dq_score(part, ONE, TWO, horizon=found.horizon, service=service)
        assert own.n_used == other.n_used == 27_500 - found.horizon
        assert own.value == pytest.approx(other.value, rel=0.05)
        assert own.standard_error == pytest.approx(other.standard_error, rel=0.05)
    assert found.dq_log == result.scores.with_service.value
    assert result.scores.with_service.standard_error < result.scores.without_service.standard_error
    # With arms drawn anew the twin's DQ has the log's expectation.
    apart = found.dq_log - found.dq_twin
    error = math.sqrt(found.standard_error**2 - result.twin_standard_error**2)
    assert abs(apart) < Z * error
    assert 0.5 < error / result.scores.with_service.standard_error < math.sqrt(2.0)


def test_where_scores_cannot_be_had_the_fallback_is_by_response():
    # Of unequal rates that are found from a log ties are lost, so expected delays have no ranks.
    scenario = SMALL.replace(
        service_rates=[0.5, 0.8, 1.2, 1.9],
        arrivals=qdq.Poisson(0.45),
        treatment=qdq.ShortestExpectedDelay(3),
    )
    log = simulated(scenario, n=12_000)
    found = qdq.log_twin(log, ONE, scenario.treatment)
    assert found.fallback.method == "dq_response"
    assert found.scores == (None, None)
    assert found.fallback.value == pytest.approx(
        found.twin_value + found.fallback.dq_log - found.fallback.dq_twin
    )
    apart = abs(found.fallback.value - found.twin_value)
    assert apart < Z * found.fallback.standard_error


def test_a_twin_that_is_not_trusted_says_so_and_gives_the_fallback():
    found = qdq.log_twin(queueing_log(12_000, slow=0.1), ONE, THREE)
    assert (found.value, found.standard_error) == found.fallback[:2]
    assert found.twin_value != found.value
    assert found.degrees_of_freedom == found.fallback.degrees_of_freedom
    for text in (repr(found), found._repr_html_()):
        assert "ot trusted" in text
        assert "requirement_and_queue" in text
        assert "may miss half the effect at high load" in text
        assert "the twin alone says" in text


def test_the_interval_of_the_fallback_covers_the_slope():
    """Servers slower by a tenth for each task met, which a twin of their services does not know."""
    slope = slope_of_queueing(slow=0.1)
    found = [qdq.log_twin(queueing_log(12_000, slow=0.1, seed=s), ONE, THREE) for s in range(5)]
    assert not any(one.trusted for one in found)
    error = math.sqrt(sum(one.standard_error**2 for one in found)) / 5
    assert abs(np.mean([one.value for one in found]) - slope) < Z * error
    assert Z * error < abs(slope)


# --------------------------------------------------------------------------------------------------
# What a policy would do that was never run
# --------------------------------------------------------------------------------------------------


def untested(log, policy, **options):
    with pytest.warns(UserWarning, match="only the policies of its two arms have been tested"):
        return qdq.what_if(log, policy, ONE, TWO, **options)


def test_with_the_treatment_it_is_the_log_twin(log, result):
    found = qdq.what_if(log, TWO, ONE, TWO)
    assert found.trusted
    assert found.tested
    assert (found.value, found.standard_error) == (result.value, result.standard_error)
    assert found.method == "what_if"
    assert found.tests == result.tests
    assert found.scenario == result.scenario
    recorded = simulated(n=10_000, warm_up=0.0, record=("candidates", "service_time"))
    again = [qdq.what_if(recorded, TWO, ONE, TWO), qdq.log_twin(recorded, ONE, TWO)]
    assert again[0].value == again[1].value


def test_with_the_control_nothing_changes(log):
    found = qdq.what_if(log, ONE, ONE, TWO)
    assert (found.value, found.standard_error) == (0.0, 0.0)
    # M/M/1 queues.
    mean = found.mean_response
    assert abs(mean.value - 1.0 / 0.3) < Z * mean.standard_error
    assert mean.low < mean.value < mean.high


@pytest.mark.parametrize("policy", [THREE, qdq.JoinShortestQueue()], ids=repr)
def test_policies_that_were_never_run_are_near_their_truth(log, policy):
    truth = qdq.true_effect(SMALL.replace(treatment=policy))
    found = untested(log, policy)
    assert found.trusted
    assert not found.tested
    error = math.hypot(found.standard_error, truth.standard_error)
    assert abs(found.value - truth.value) < Z * error
    mean = 1.0 / 0.3 + truth.value
    error = math.hypot(found.mean_response.standard_error, truth.standard_error)
    assert abs(found.mean_response.value - mean) < Z * error
    assert Z * error < 0.4 * abs(truth.value)  # so it is told from control's
    assert found.scenario.treatment == policy
    for text in (repr(found), found._repr_html_()):
        assert "no task of the log was routed by" in text
        assert "mean response is" in text


def test_candidates_that_are_too_few_for_a_policy_are_drawn_anew():
    log = simulated(n=10_000, warm_up=0.0, record=("candidates",))
    assert log.candidates.shape == (10_000, 2)
    found = untested(log, THREE)
    assert found.trusted
    assert "choices" in {test.name for test in found.tests}


def test_a_twin_that_is_not_trusted_says_nothing_of_other_policies():
    log = queueing_log(12_000, slow=0.1)
    with pytest.warns(UserWarning, match="only the policies of its two arms"):
        found = qdq.what_if(log, TWO, ONE, THREE)
    assert not found.trusted
    assert math.isnan(found.value)
    assert math.isnan(found.standard_error)
    assert found.twin_value < 0.0
    assert "not trusted" in repr(found)
    assert f"it says {found.twin_value:.6g}" in repr(found)


def test_a_policy_that_overloads_a_server_is_seen():
    scenario = SMALL.replace(service_rates=[0.6, 0.6, 1.4, 1.4], control=TWO, treatment=THREE)
    log = simulated(scenario, n=12_000)
    with pytest.warns(UserWarning, match="only the policies of its two arms"):
        found = qdq.what_if(log, ONE, TWO, THREE)
    assert failed(found) == {"load"}
    assert "under PowerOfD(d=1) alone" in found.verdict
    assert math.isnan(found.value)


def test_questions_about_what_is_no_policy_are_refused(log):
    with pytest.raises(TypeError, match="policy=3 is not a policy"):
        qdq.what_if(log, 3, ONE, TWO)
    with pytest.raises(ValueError, match=r"policy=PowerOfD\(d=5\) samples more servers .* most 4"):
        qdq.what_if(log, qdq.PowerOfD(5), ONE, TWO)
    with pytest.raises(ValueError, match="too few: what_if needs 2400"):
        qdq.what_if(simulated(n=2_000), TWO, ONE, TWO)


# --------------------------------------------------------------------------------------------------
# The result
# --------------------------------------------------------------------------------------------------


def test_the_result_is_an_estimate(result):
    assert isinstance(result, qdq.Estimate)
    assert result.method == "log_twin"
    row = result.to_frame().iloc[0]
    assert (row["method"], row["value"], row["n_used"]) == ("log_twin", result.value, 27_500)
    low, high = result.confidence_interval()
    assert (high - low) / 2.0 == pytest.approx(2.093 * result.standard_error, rel=1e-3)
    assert result.verdict == "trusted: all 5 tests of fit hold"
    assert result.verdict in repr(result)
    assert "Trusted: all 5 tests of fit hold." in result._repr_html_()
    assert "alone" not in repr(result)


def test_the_fitted_system_can_be_simulated_again(log, result):
    again = qdq.simulate(result.scenario, qdq.AllControl(), n_tasks=log.n_tasks, seed=1)
    assert_array_equal(again.arrival, log.arrival)
    assert not result.scenario.allow_unstable
    # M/M/1 queues.
    assert again.response_time[2_000:].mean() == pytest.approx(1.0 / (1.0 - 0.7), rel=0.15)


def test_the_figure_shows_the_figures(result):
    import matplotlib.pyplot as plt

    figure = figures.twin(result)
    top, middle, bottom = figure.axes
    names = [label.get_text() for label in top.get_yticklabels()]
    assert names == [moment.name for moment in result.moments]
    points = top.lines[0].get_xdata()
    assert_allclose(points, [100.0 * (m.twin / m.log - 1.0) for m in result.moments])
    assert_allclose(middle.lines[0].get_ydata(), result.by_queue.requirement)
    assert_allclose(bottom.lines[0].get_ydata(), np.sort(result.loads.control))
    assert_allclose(bottom.lines[1].get_ydata(), np.sort(result.loads.treatment))
    plt.close(figure)


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


def test_other_designs_are_refused_by_name():
    log = qdq.simulate(SMALL, qdq.Switchback(50.0), n_tasks=5_000, seed=1)
    with pytest.raises(ValueError, match=r"Bernoulli, and this one is of design Switchback"):
        qdq.log_twin(log, ONE, TWO)
    with pytest.raises(ValueError, match="column period, a switchback"):
        qdq.log_twin(outside(log, carried_over=np.empty((0, 3))), ONE, TWO)
    split = qdq.simulate(SMALL, qdq.ServerSplit(), n_tasks=5_000, seed=1)
    with pytest.raises(ValueError, match="of design ServerSplit"):
        qdq.log_twin(split, ONE, TWO)


def test_bad_arguments_are_refused_by_name(log):
    with pytest.raises(TypeError, match="log is a str: it must be a TaskLog"):
        qdq.log_twin("log", ONE, TWO)
    with pytest.raises(TypeError, match=r"control=2 is not a policy"):
        qdq.log_twin(log, 2, TWO)
    with pytest.raises(ValueError, match=r"treatment=PowerOfD\(d=5\) samples more servers"):
        qdq.log_twin(log, ONE, qdq.PowerOfD(5))
    with pytest.raises(ValueError, match=r"n_servers=3 is not allowed.*the log's own, 4, or None"):
        qdq.log_twin(log, ONE, TWO, n_servers=3)
    with pytest.raises(ValueError, match=r"level=1\.5 is not allowed"):
        qdq.log_twin(log, ONE, TWO, level=1.5)
    with pytest.raises(ValueError, match="seed=-1"):
        qdq.log_twin(log, ONE, TWO, seed=-1)


def test_logs_that_say_too_little_are_refused(log):
    with pytest.raises(ValueError, match="no column server"):
        qdq.log_twin(replace(log, server=None), ONE, TWO)
    every = qdq.simulate(SMALL, qdq.Bernoulli(0.5), n_tasks=3_000, seed=1)
    alike = np.ones(3_000, bool)
    with pytest.raises(ValueError, match="3000 of the log's 3000 tasks are treated"):
        qdq.log_twin(outside(every, treated=alike, propensity=None), ONE, TWO)
    with pytest.raises(ValueError, match=r"the log's 2000 tasks are too few: log_twin needs 2400"):
        qdq.log_twin(simulated(n=2_000), ONE, TWO)
    rare = np.zeros(log.n_tasks, bool)
    rare[::1_000] = True
    with pytest.raises(ValueError, match="10 of either arm; it has 27500, and 1 in one stretch"):
        qdq.log_twin(outside(log, treated=rare, propensity=None), ONE, TWO)


@pytest.mark.parametrize(("order", "rate"), [("last", 0.7), ("two oldest", 0.8)])
def test_servers_that_neither_wait_in_line_nor_share_are_refused(order, rate):
    log, _ = sharing_log(order=order, rate=rate, n=6_000)
    with pytest.raises(ValueError, match=r"neither FCFS .* nor do they share their effort"):
        qdq.log_twin(log, ONE, TWO)


def test_servers_that_serve_two_tasks_at_full_speed_are_not_trusted():
    log, _ = sharing_log(order="two slots", rate=0.8, n=12_000)
    found = qdq.log_twin(log, ONE, TWO)
    assert found.scenario.discipline == "processor_sharing"
    assert {"moments", "requirement_and_queue"} <= failed(found)


def test_the_number_of_servers_is_the_logs_or_else_warned_of(log, result):
    unknown = outside(log, n_servers=None)
    with pytest.warns(UserWarning, match="taken to be 4, as many as occur: give"):
        assert qdq.log_twin(unknown, ONE, TWO) == result
    with pytest.warns(UserWarning, match="would not have sent them"):
        more = qdq.log_twin(unknown, ONE, TWO, n_servers=8)
    assert more.scenario.n_servers == 8
    assert "moments" in failed(more)
