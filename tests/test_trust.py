"""Checks of a log: each fires on a log made to break it, and none on a clean one."""

from __future__ import annotations

import heapq
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import qdq
from qdq import trust

CHECKS = (
    "sample_ratio",
    "independent_arms",
    "constant_rate",
    "feedback",
    "littles_law",
    "complete_end",
    "tail",
)


def queueing_log(arrival, treated, servers=40, service=None, seed=1, **fields):
    """Serve tasks in order of arrival by the first server that is free."""
    rng = np.random.default_rng((seed, 1))
    service = rng.exponential(size=arrival.size) if service is None else service
    free = [arrival[0]] * servers
    departure = np.empty(arrival.size)
    for k, time in enumerate(arrival):
        departure[k] = max(time, heapq.heappop(free)) + service[k]
        heapq.heappush(free, departure[k])
    return qdq.TaskLog(arrival=arrival, departure=departure, treated=treated, **fields)


def clean(n=30_000, seed=1, rate=32.0, servers=40, **fields):
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / rate, n))
    treated = rng.random(n) < 0.5
    return queueing_log(arrival, treated, servers, seed=seed, **{"propensity": 0.5} | fields)


@pytest.fixture(scope="module")
def log():
    return clean()


def failed(log):
    return [name for name, check in trust.checks(log).items() if check["passed"] is False]


def doubts_of(log, methods=("naive", "dq_response"), **options):
    """Return what `estimate` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qdq.estimate(log, list(methods), **{"horizon": 60} | options)
    return [str(warning.message) for warning in caught]


# --------------------------------------------------------------------------------------------------
# A clean log
# --------------------------------------------------------------------------------------------------


def test_a_clean_log_passes_all_checks(log):
    found = trust.checks(log)
    assert tuple(found) == CHECKS
    assert {name: check["passed"] for name, check in found.items()} == dict.fromkeys(CHECKS, True)
    assert doubts_of(log, ("naive", "dq_response", "dq_queue", "dq_mixed")) == []


@pytest.mark.parametrize("name", ["sample_ratio", "independent_arms", "constant_rate", "feedback"])
def test_p_values_of_clean_logs_are_uniform(name):
    """By the test of Kolmogorov and Smirnov, false alarm 1e-5; a count's p-value is too large."""
    found = []
    for seed in range(150):
        rng = np.random.default_rng(1000 + seed)
        arrival = np.cumsum(rng.exponential(size=2_000))
        departure = arrival + rng.exponential(2.0, 2_000)
        log = qdq.TaskLog(
            arrival=arrival,
            departure=departure,
            treated=rng.random(2_000) < 0.3,
            propensity=0.3,
        )
        found.append(getattr(trust, f"_{name}")(log)["p_value"])
    alternative = "greater"  # of distribution functions: too many small p-values
    assert stats.kstest(found, "uniform", alternative=alternative).pvalue > 1e-5
    if name != "sample_ratio":
        assert stats.kstest(found, "uniform").pvalue > 1e-5


# --------------------------------------------------------------------------------------------------
# Arms
# --------------------------------------------------------------------------------------------------


def test_arms_in_another_proportion(log):
    rare = replace(log, treated=np.random.default_rng(2).random(log.n_tasks) < 0.47)
    assert failed(rare) == ["sample_ratio"]
    p = stats.binomtest(int(rare.treated.sum()), rare.n_tasks, 0.5).pvalue
    assert trust.checks(rare)["sample_ratio"]["p_value"] == pytest.approx(p, rel=0.02)
    unknown = trust.checks(replace(rare, propensity=None))["sample_ratio"]
    assert unknown == {"propensity": None, "p_value": None, "passed": None}


def test_arms_that_users_keep(log):
    # Each of 2,000 users has one arm and asks five times in a row or so.
    rng = np.random.default_rng(3)
    user = np.sort(rng.integers(0, log.n_tasks // 5, log.n_tasks))
    by_user = replace(log, treated=(user * 2654435761 % 2**32) < 2**31)
    assert failed(replace(by_user, propensity=None)) == ["independent_arms"]
    check = trust.checks(by_user)["independent_arms"]
    assert check["lags"] == 64
    assert check["largest_correlation"] > 0.5
    assert any("arms of neighbouring tasks are correlated" in said for said in doubts_of(by_user))


def test_arms_that_take_turns(log):
    turns = replace(log, treated=np.arange(log.n_tasks) % 2 == 0)
    assert failed(turns) == ["independent_arms"]
    correlation = trust.checks(turns)["independent_arms"]["largest_correlation"]
    assert abs(correlation) == pytest.approx(1.0, abs=1e-3)


def test_independent_arms_by_ljung_and_box(log):
    z = log.treated - log.treated.mean()
    n = z.size
    rho = np.array([np.sum(z[k:] * z[: n - k]) for k in range(1, 65)]) / np.sum(z * z)
    statistic = n * (n + 2) * np.sum(rho**2 / (n - np.arange(1, 65)))
    check = trust.checks(log)["independent_arms"]
    assert check["p_value"] == pytest.approx(stats.chi2.sf(statistic, 64), rel=1e-9)
    assert abs(check["largest_correlation"]) == pytest.approx(np.abs(rho).max(), rel=1e-12)


def test_arms_that_are_not_drawn_task_by_task_are_not_checked(log):
    period = np.arange(log.n_tasks) // 500
    switched = replace(log, period=period, treated=period % 2 == 0)
    split = replace(log, design=qdq.ServerSplit(), propensity=None)
    short = replace(clean(200), skip=0.0)
    for other in (switched, split, short):
        check = trust.checks(other)["independent_arms"]
        assert check == {
            "lags": None,
            "largest_correlation": None,
            "p_value": None,
            "passed": None,
        }
    assert trust.by_task(log)
    assert not trust.by_task(switched)
    assert not trust.by_task(split)


# --------------------------------------------------------------------------------------------------
# Arrivals
# --------------------------------------------------------------------------------------------------


def test_a_periodic_rate():
    rng = np.random.default_rng(4)
    n = 30_000
    unit = np.cumsum(rng.exponential(size=n))
    # Invert the integral of 30 (1 + 0.5 sin(t / 5)).
    grid = np.linspace(0.0, 2000.0, 400_001)
    arrival = np.interp(unit, 30.0 * (grid + 2.5 * (1.0 - np.cos(grid / 5.0))), grid)
    log = queueing_log(arrival, rng.random(n) < 0.5, propensity=0.5)
    assert "constant_rate" in failed(log)
    assert set(failed(log)) <= {"constant_rate", "complete_end"}
    assert any(
        "queue='time_average' needs no rate" in said for said in doubts_of(log, ["dq_queue"])
    )
    assert not any("constant rate" in said for said in doubts_of(log, ["dq_response"]))
    # Gaps are shorter where queues are long, so there is no feedback in it.
    assert trust.checks(log)["feedback"]["correlation"] < 0.0


def closed_loop(clients=40, n=20_000, servers=20, thinking=0.5):
    """Clients that think, ask, and wait for the answer."""
    rng = np.random.default_rng(5)
    asking = [(time, 0) for time in rng.exponential(thinking, clients)]
    heapq.heapify(asking)
    free = [0.0] * servers
    rows = []
    while len(rows) < n:
        time, _ = heapq.heappop(asking)
        end = max(time, heapq.heappop(free)) + rng.exponential()
        heapq.heappush(free, end)
        rows.append((time, end))
        heapq.heappush(asking, (end + rng.exponential(thinking), 0))
    arrival, departure = np.array(rows).T
    return qdq.TaskLog(
        arrival=arrival, departure=departure, treated=rng.random(n) < 0.5, propensity=0.5
    )


def test_clients_that_wait_for_answers():
    log = closed_loop()
    assert failed(log) == ["feedback"]
    assert trust.checks(log)["feedback"]["correlation"] > 0.05
    assert any("as of clients that wait for answers" in said for said in doubts_of(log))


def test_feedback_by_numpy(log):
    found = np.arange(log.n_tasks) - np.searchsorted(np.sort(log.departure), log.arrival, "right")
    correlation = np.corrcoef(found[:-1], np.diff(log.arrival))[0, 1]
    check = trust.checks(log)["feedback"]
    assert check["correlation"] == pytest.approx(correlation, rel=1e-9)
    p = stats.norm.sf(correlation * math.sqrt(log.n_tasks - 1))
    assert check["p_value"] == pytest.approx(p, rel=1e-9)


# --------------------------------------------------------------------------------------------------
# Ends
# --------------------------------------------------------------------------------------------------


def cut(log, share=0.9):
    """Return what had ended at a moment, as of a log that is written when tasks end."""
    kept = log.departure <= log.arrival[int(share * log.n_tasks)]
    return replace(
        log, arrival=log.arrival[kept], departure=log.departure[kept], treated=log.treated[kept]
    )


def test_a_log_that_was_cut_while_tasks_ran():
    found = 0
    for seed in range(10):
        short = cut(clean(12_000, seed=seed, rate=150.0, servers=200))
        check = trust.checks(short)["complete_end"]
        assert check["arrived"] < check["expected"]
        found += check["passed"] is False
    assert found == 10  # 95 tasks are missing in the last 150 or so
    assert any("the log was cut while tasks were running" in said for said in doubts_of(short))


@pytest.mark.parametrize("servers", [1, 2, 4, 40])
def test_a_log_whose_queues_ran_empty_was_not_cut(servers):
    """However long the last queue took: none in 40 logs, of which 0.04 are to be expected."""
    checked = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        arrival = np.cumsum(rng.exponential(1.0 / (0.97 * servers), 4_000))
        log = queueing_log(arrival, rng.random(4_000) < 0.5, servers, seed=seed)
        check = trust.checks(log)["complete_end"]
        assert check["passed"] is not False
        checked += check["passed"] is True
    assert checked >= 5


def test_the_end_by_counting(log):
    check = trust.checks(log)["complete_end"]
    mean = log.response_time.mean()
    back = log.arrival[-1] - log.arrival[:-1]
    arrived, before = np.sum(back < mean), np.sum((back >= mean) & (back < 21.0 * mean))
    assert (check["arrived"], check["expected"]) == (arrived, before / 20.0)
    law = stats.binom(arrived + before, 1.0 / 21.0)
    assert check["p_value"] == pytest.approx(law.cdf(arrived), rel=1e-9)


def test_ends_of_simulated_and_of_short_logs_are_not_checked():
    simulated = qdq.simulate(qdq.Scenario(n_servers=60), qdq.Bernoulli(0.5), 20_000, seed=1)
    short = clean(400)
    for log in (simulated, short):
        assert trust.checks(log)["complete_end"] == {
            "expected": None,
            "arrived": None,
            "p_value": None,
            "passed": None,
        }


def test_lost_lines_and_long_ends(log):
    counted = np.arange(log.n_tasks) - np.searchsorted(np.sort(log.departure), log.arrival, "right")
    assert failed(replace(log, in_system=counted)) == []
    lost = replace(log, in_system=counted + (np.arange(log.n_tasks) % 2 == 0))
    assert failed(lost) == ["littles_law"]
    assert trust.checks(lost)["littles_law"]["unlogged"] == pytest.approx(0.5 / 32.0, rel=0.05)
    late = log.departure.copy()
    late[-1500:] += 8.0
    assert "littles_law" in failed(replace(log, departure=late))
    error = trust.checks(log)["littles_law"]["number_in_system_error"]
    # As of 40 servers at load 0.8, which are nearly as many as ever are needed: M/M/infinity has
    # the variance rate * 2 over the time.
    span = np.ptp(log.arrival)
    assert error == pytest.approx(math.sqrt(2.0 * 32.0 / span), rel=0.6)


# --------------------------------------------------------------------------------------------------
# Tails
# --------------------------------------------------------------------------------------------------


def test_a_heavy_tail():
    rng = np.random.default_rng(6)
    n = 30_000
    arrival = np.cumsum(rng.exponential(1 / 20.0, n))
    service = 0.5 * (rng.pareto(1.8, n) + 0.01)
    log = queueing_log(arrival, rng.random(n) < 0.5, 200, service, propensity=0.5)
    assert failed(log) == ["tail"]
    check = trust.checks(log)["tail"]
    assert check["hill_index"] < 2.5
    assert any("response times have a heavy tail (index" in said for said in doubts_of(log))


def test_one_response_that_is_a_tenth_of_all(log):
    departure = log.departure.copy()
    departure[100] += 0.1 * log.response_time.sum()
    check = trust.checks(replace(log, departure=departure))["tail"]
    assert check["passed"] is False
    assert check["share_of_largest_thousandth"] > 0.09


def test_tails_of_few_tasks_are_not_judged():
    assert trust.checks(clean(399))["tail"]["passed"] is None
    passed = [trust.checks(clean(400, seed=seed))["tail"]["passed"] for seed in range(20)]
    assert passed.count(True) >= 17
    assert not any("heavy tail" in said for said in doubts_of(clean(60, rate=2.0), ["naive"]))


# --------------------------------------------------------------------------------------------------
# Doubts
# --------------------------------------------------------------------------------------------------


def test_short_logs_are_said_to_be_short():
    said = doubts_of(clean(5_000), ["dq_mixed"])
    assert said == ["dq_mixed has 82 windows side by side of horizon 60: 200 are advised"]
    assert doubts_of(clean(13_000), ["dq_mixed"]) == []


def test_few_degrees_of_freedom_are_said():
    # 99 % of the time of a single server: its queue remembers for thousands of tasks.
    rng = np.random.default_rng(7)
    arrival = np.cumsum(rng.exponential(1.0 / 0.99, 20_000))
    log = queueing_log(arrival, rng.random(20_000) < 0.5, servers=1)
    log = replace(log, treated=log.arrival > np.median(log.arrival), propensity=None)
    estimate = qdq.Estimate(
        method="naive",
        value=0.0,
        standard_error=1.0,
        level=0.95,
        degrees_of_freedom=trust.FEW_TERMS - 1.0,
        n_used=20_000,
        variance="hac",
    )
    (said,) = [x for x in trust.doubts(log, [estimate]) if "short" in x]
    assert "the standard error of naive has 4 degrees of freedom" in said
    enough = replace(estimate, degrees_of_freedom=float(trust.FEW_TERMS))
    assert not any("short" in x for x in trust.doubts(log, [enough]))


def test_simulated_logs_are_doubted_by_their_scenario():
    light = qdq.Scenario(n_servers=4)
    log = qdq.simulate(light, qdq.Bernoulli(0.5), 300, seed=1)
    assert doubts_of(log) == []  # short as it is, and drained
    heavy = light.replace(service=qdq.Pareto(2.5))
    log = qdq.simulate(heavy, qdq.Bernoulli(0.5), 300, seed=1)
    (said,) = doubts_of(log)
    assert said.startswith("response times need not have a fourth moment with Pareto(shape=2.5")
    lighter = light.replace(service=qdq.Pareto(5.1))
    assert doubts_of(qdq.simulate(lighter, qdq.Bernoulli(0.5), 300, seed=1)) == []


def test_a_split_of_unequal_groups():
    scenario = qdq.Scenario(
        n_servers=5, control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2), arrivals=qdq.Poisson(0.5)
    )
    log = qdq.simulate(scenario, qdq.ServerSplit(), 2_000, seed=1)
    with pytest.warns(UserWarning, match="server_split has no standard error, as the servers of"):
        found = qdq.server_split(log)
    assert math.isnan(found.standard_error)
    assert math.isnan(found.low)
    assert math.isfinite(found.value)
    even = scenario.replace(n_servers=6)
    found = qdq.server_split(qdq.simulate(even, qdq.ServerSplit(), 2_000, seed=1))
    assert found.standard_error > 0.0


def test_warnings_point_to_the_caller():
    with pytest.warns(UserWarning, match="200 are advised") as seen:
        qdq.dq_response(clean(5_000), horizon=60)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="200 are advised") as seen:
        qdq.estimate(clean(5_000), ["dq_response"], horizon=60)
    assert seen[0].filename == __file__


# --------------------------------------------------------------------------------------------------
# Advice
# --------------------------------------------------------------------------------------------------


def advice_of(log, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame = qdq.estimate(log, **{"horizon": 60} | options)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    known = {
        "treated_share": float(log.treated.mean()),
        "load": None,
        "longest_response": float(log.response_time.max()),
    }
    return trust.advice(log, known, trust.checks(log), rows)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda log: log, "slope of the mean response"),
        (lambda log: replace(log, propensity=0.4), "is not what was intended"),
        (
            lambda log: replace(log, treated=np.arange(log.n_tasks) % 2 == 0),
            "Arms were not drawn task by task",
        ),
        (lambda log: closed_loop(), "Arrivals come more slowly when queues are long"),
        (
            lambda log: cut(clean(12_000, rate=150.0, servers=200)),
            "it was cut while tasks were running",
        ),
        (lambda log: log, "Tasks that other load balancers send"),
        (lambda log: log, "taken to start with an empty system"),
        (lambda log: log, "The load is not known"),
        (lambda log: clean(5_000), "The log is short: 82 horizons side by side"),
    ],
)
def test_advice_says_what_the_checks_found(log, make, words):
    assert any(words in said for said in advice_of(make(log)))


def test_advice_says_no_more(log):
    for word in ("intended", "drawn task by task", "more slowly", "cut", "heavy", "log's ends"):
        assert not any(word in said for said in advice_of(log))
    skipped = replace(log, skip=10.0)
    assert not any("nothing was skipped" in said for said in advice_of(skipped))


def test_units():
    log = clean(300)
    assert trust.unit_of(log) == (1.0, "", "the file's unit")
    assert trust.unit_of(replace(log, time_unit="s")) == (1000.0, "ms", "ms")
    assert trust.unit_of(replace(log, time_unit="h")) == (1.0, "h", "h")
