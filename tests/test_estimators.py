"""Estimators, against the definitions written out as loops over every task and window."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import qdq
from qdq import inference, kernels
from qdq.estimators import METHODS, NORMALISATIONS, QUEUES, RATES

# The logs here are made by hand and short, and are said to be so: see test_trust.py.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{doubt}:UserWarning")
    for doubt in ("windows side by side", "the log was cut", "degrees of freedom")
]

HAPROXY = Path(__file__).parents[1] / "book" / "data" / "haproxy" / "ab-rho80.haproxy.log.gz"
DELAY = 0.5
SERVERS = 3

# --------------------------------------------------------------------------------------------------
# Logs
# --------------------------------------------------------------------------------------------------

# Multiples of 1/8 are added without rounding, so ties in time are exact; zero gives simultaneous
# arrivals and tasks that leave at once.
eighths = st.integers(0, 24).map(lambda k: k / 8)
times = eighths | st.floats(0.0, 3.0)


def queueing_log(gaps, services, servers, treated, carried=(), delay=0.0, **fields):
    """Serve tasks first come, first served; `carried` holds server and service of earlier tasks."""
    free = [-1.0] * SERVERS
    carried_over = []
    for server, service in carried:
        start, free[server] = free[server], free[server] + service
        if free[server] > 0.0:
            carried_over.append([server, start, free[server]])
    arrival = np.cumsum(gaps)
    departure = []
    for time, service, server in zip(arrival, services, servers, strict=True):
        free[server] = max(time + delay, free[server]) + service
        departure.append(free[server])
    return qdq.TaskLog(
        arrival=arrival,
        departure=np.array(departure),
        treated=np.array(treated),
        server=np.array(servers),
        service_time=np.array(services, dtype=float),
        carried_over=np.array(carried_over).reshape(-1, 3),
        n_servers=SERVERS,
        **fields,
    )


@st.composite
def logs(draw, numbers=times, delay=0.0):
    """Logs of 12 to 40 tasks, with ties, tasks carried over and a skipped stretch."""
    n = draw(st.integers(12, 40))
    p = draw(st.sampled_from([0.25, 0.5]))
    rows = draw(
        st.lists(
            st.tuples(numbers, numbers, st.integers(0, SERVERS - 1), st.booleans()),
            min_size=n,
            max_size=n,
        )
    )
    gaps, services, servers, treated = zip(*rows, strict=True)
    assume(sum(gaps[1:]) > 0.5)
    carried = draw(st.lists(st.tuples(st.integers(0, SERVERS - 1), numbers), max_size=4))
    log = queueing_log(
        gaps,
        services,
        servers,
        treated,
        carried,
        delay=delay,
        propensity=p,
        design=qdq.Bernoulli(p),
        scenario=qdq.Scenario(
            n_servers=SERVERS,
            arrivals=qdq.Periodic(0.25, 0.5, 5.0),
            control=qdq.PowerOfD(1),
            treatment=qdq.PowerOfD(2),
            dispatch_delay=delay,
        ),
    )
    return replace(log, skip=draw(st.sampled_from([0.0, 0.0, log.arrival[2] - log.arrival[0]])))


def random_log(n=400, seed=1, **fields):
    rng = np.random.default_rng(seed)
    fields = {"propensity": 0.5, "design": qdq.Bernoulli(0.5)} | fields
    return queueing_log(
        rng.exponential(1 / 2.4, n),
        rng.exponential(size=n),
        rng.integers(SERVERS, size=n),
        rng.random(n) < 0.5,
        **fields,
    )


# --------------------------------------------------------------------------------------------------
# The definitions, written out
# --------------------------------------------------------------------------------------------------


def starts_of(log):
    """Return the start of service of each task, served in order at its server."""
    free = dict.fromkeys(range(SERVERS), -math.inf)
    for server, _, departure in log.carried_over:
        free[int(server)] = max(free[int(server)], departure)
    delay = 0.0 if log.scenario is None else log.scenario.dispatch_delay
    starts = []
    for a, d, s in zip(log.arrival, log.departure, log.server, strict=True):
        starts.append(max(a + delay, free[s]))
        free[s] = d
    return starts


def count_found(log, k, end, carried_end):
    """Count the tasks before k, those carried over included, whose end lies after arrival k."""
    a = log.arrival[k]
    return sum(end[j] > a for j in range(k)) + sum(c > a for c in carried_end)


def area(log, begin, end):
    """Integrate the number in system from one time to another."""
    present = [*zip(log.arrival, log.departure, strict=True)]
    present += [(-math.inf, d) for d in log.carried_over[:, 2]]
    return math.fsum(max(0.0, min(d, end) - max(a, begin)) for a, d in present)


def sums_of_windows(log, horizon, queue, rate):
    """Return Qw_i, Qq_i and Z_i of all windows; `rate` is a number, a name or a function."""
    n, arrival = log.n_tasks, log.arrival
    response = log.departure - arrival
    if queue == "waiting":
        found = [count_found(log, k, starts_of(log), log.carried_over[:, 1]) for k in range(n)]
    else:
        found = [count_found(log, k, log.departure, log.carried_over[:, 2]) for k in range(n)]
    if queue == "including_self":
        found = [q + 1 for q in found]
    estimated = (n - 1) / (arrival[-1] - arrival[0])
    rows = []
    for i in range(n):
        if arrival[i] < arrival[0] + log.skip or i + horizon > n - 1:
            continue
        qw = math.fsum(response[i : i + horizon])
        if queue == "time_average":
            qq = area(log, arrival[i], arrival[i + horizon])
        elif rate == "window":
            qq = sum(found[i + 1 : i + horizon + 1]) * (arrival[i + horizon] - arrival[i]) / horizon
        else:
            qq = 0.0
            for k in range(i + 1, i + horizon + 1):
                if rate == "estimated":
                    r = estimated
                elif rate == "scenario":
                    r = SERVERS * 0.25 * (1 + 0.5 * math.sin(2 * math.pi * arrival[k] / 5.0))
                elif callable(rate):
                    r = rate(arrival[k])
                else:
                    r = rate
                qq += found[k] / r
        rows.append((qw, qq, log.treated[i]))
    qw, qq, z = map(np.array, zip(*rows, strict=True))
    return qw, qq, z.astype(bool)


def differences(qw, qq, z, propensity=None):
    """Return wDQ, qDQ and their covariance matrix."""
    if propensity is None:
        value = [x[z].mean() - x[~z].mean() for x in (qw, qq)]
        return *value, sum(np.cov(qw[arm], qq[arm]) / arm.sum() for arm in (z, ~z))
    score = [np.where(z, x / propensity, -x / (1 - propensity)) for x in (qw, qq)]
    return score[0].mean(), score[1].mean(), np.cov(*score) / z.size


RATE_READINGS = {
    "number": 1.5,
    "estimated": "estimated",
    "window": "window",
    "scenario": "scenario",
    "array function": lambda t: 2.0 + np.sin(t),
    "scalar function": lambda t: 2.0 if t < 9.0 else 1.0,
    "constant function": lambda t: 3.0,
}


def assert_equals_definition(log, horizon, normalise, queue, rate, reference=None):
    """Compare the DQ methods on `log` with the definition on `reference`, by default the same."""
    qw, qq, z = sums_of_windows(reference or log, horizon, queue, rate)
    assume(min(z.sum(), (~z).sum()) >= 2)
    propensity = log.propensity if normalise == "inverse_propensity" else None
    wdq, qdq_, cov = differences(qw, qq, z, propensity)
    options = {"horizon": horizon, "normalise": normalise, "variance": "score"}
    rates = {"queue": queue, "arrival_rate": rate}

    scale = np.abs(qw).max() + np.abs(qq).max() + 1.0
    close = {"rel": 1e-9, "abs": 1e-11 * scale / min(log.propensity, 1 - log.propensity)}
    close_squared = {"rel": 1e-9, "abs": 1e-11 * scale**2}
    w = qdq.dq_response(log, **options)
    assert w.value == pytest.approx(wdq, **close)
    assert w.standard_error**2 == pytest.approx(cov[0, 0], **close_squared)
    q = qdq.dq_queue(log, **options, **rates)
    assert q.value == pytest.approx(qdq_, **close)
    assert q.standard_error**2 == pytest.approx(cov[1, 1], **close_squared)
    mixed = qdq.dq_mixed(log, **options, **rates)
    assert mixed.covariance == pytest.approx(cov[0, 1], **close_squared)
    assert w.n_used == q.n_used == mixed.n_used == z.size
    spread = cov[0, 0] + cov[1, 1] - 2 * cov[0, 1]
    if spread > 1e-6 * (cov[0, 0] + cov[1, 1]):  # else alpha is made of rounding errors
        alpha = (cov[1, 1] - cov[0, 1]) / spread
        assert mixed.alpha == pytest.approx(alpha, rel=1e-4, abs=1e-4)
        assert mixed.value == pytest.approx(alpha * wdq + (1 - alpha) * qdq_, rel=1e-4, abs=1e-3)
        weights = np.array([alpha, 1 - alpha])
        variance = weights @ cov @ weights
        assert mixed.standard_error**2 == pytest.approx(variance, rel=1e-4, abs=1e-6 * scale**2)


# --------------------------------------------------------------------------------------------------
# Every DQ method and switch equals its definition
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", RATE_READINGS)
@pytest.mark.parametrize("queue", ["in_system", "including_self", "waiting"])
@pytest.mark.parametrize("normalise", NORMALISATIONS)
@settings(max_examples=12, deadline=None)
@given(log=logs(), horizon=st.integers(1, 7))
def test_dq_equals_its_definition(normalise, queue, rate, log, horizon):
    # The carried-over start of a rounded service is compared to the same float, so any numbers do.
    if queue == "waiting":
        log = replace(log, service_time=None)
    assert_equals_definition(log, horizon, normalise, queue, RATE_READINGS[rate])


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@settings(max_examples=40, deadline=None)
@given(log=logs(), horizon=st.integers(1, 7))
def test_time_average_equals_its_definition(normalise, log, horizon):
    assert_equals_definition(log, horizon, normalise, "time_average", None)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(times, times, st.booleans()), min_size=12, max_size=30),
    horizon=st.integers(1, 7),
    queue=st.sampled_from(["in_system", "including_self", "time_average"]),
)
def test_departures_in_any_order(rows, horizon, queue):
    gaps, responses, treated = map(np.array, zip(*rows, strict=True))
    assume(gaps[1:].sum() > 0.0)
    arrival = np.cumsum(gaps)
    log = qdq.TaskLog(
        arrival=arrival, departure=arrival + responses, treated=treated, propensity=0.25
    )
    assert_equals_definition(log, horizon, "inverse_propensity", queue, "estimated")


@pytest.mark.parametrize("delay", [0.0, DELAY])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), horizon=st.integers(1, 7))
def test_start_of_service_from_service_times_or_from_servers(delay, data, horizon):
    log = data.draw(logs(numbers=eighths, delay=delay))  # D - S is then exactly the start
    from_service = replace(log, server=None)
    from_server = replace(log, service_time=None)
    for given_log in (from_service, from_server):
        assert_equals_definition(given_log, horizon, "group_means", "waiting", 1.5, reference=log)


def test_a_task_served_at_once_never_waits_for_rounding():
    # (0.1 + 0.2) - 0.2 is above 0.1: taken at its word, task 0 would still wait when task 1 comes.
    arrival = np.array([0.1, 0.1, 0.5, 0.9, 1.5, 2.5])
    service = np.array([0.2, 0.2, 0.7, 0.3, 0.2, 0.2])
    assert ((arrival + service) - service > arrival).any()
    log = qdq.TaskLog(
        arrival=arrival,
        departure=arrival + service,
        service_time=service,
        treated=np.array([1, 0, 1, 0, 1, 0]),
    )
    waiting = qdq.dq_queue(log, horizon=1, queue="waiting")
    assert (waiting.value, waiting.standard_error) == (0.0, 0.0)


def test_the_recorded_count_is_used_where_there_is_one():
    log = random_log()
    counts = np.arange(log.n_tasks)
    recorded = qdq.dq_queue(replace(log, in_system=counts), horizon=5, arrival_rate=1.0)
    i = np.arange(log.n_tasks - 5)
    sums = 5 * i + 15.0  # of i+1 .. i+5
    treated = log.treated[i]
    assert recorded.value == pytest.approx(sums[treated].mean() - sums[~treated].mean())
    # The integral needs the departures, and does not look at the record.
    areas = [
        qdq.dq_queue(x, horizon=5, queue="time_average").value
        for x in (log, replace(log, in_system=counts))
    ]
    assert areas[0] == areas[1]


# --------------------------------------------------------------------------------------------------
# Identities
# --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(log=logs())
def test_littles_law_is_an_identity_on_a_finite_log(log):
    """The integral of Q to the last departure is the sum of the times in system."""
    carried = log.carried_over[:, 2].copy()
    leaves = kernels.next_arrival(log.arrival, log.departure)
    carried_leaves = kernels.next_arrival(log.arrival, carried)
    found = kernels.tasks_in_system(leaves, carried_leaves)
    areas = kernels.area_between_arrivals(
        log.arrival[0], log.arrival, log.departure, leaves, carried, carried_leaves, found
    )
    last = log.arrival[-1]
    after = sum(np.maximum(d - last, 0.0).sum() for d in (log.departure, carried))
    before = np.maximum(carried - log.arrival[0], 0.0).sum()
    assert areas.sum() + after == pytest.approx(log.response_time.sum() + before, rel=1e-12)
    assert areas[0] == 0.0
    for k in range(1, log.n_tasks):
        expected = area(log, log.arrival[k - 1], log.arrival[k])
        assert areas[k] == pytest.approx(expected, rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("queue", QUEUES)
def test_with_the_treated_share_as_propensity_both_normalisations_agree(queue):
    log = random_log()
    share = float(log.treated[:-7].mean())
    log = replace(log, propensity=share, design=None)
    options = {"horizon": 7, "queue": queue, "arrival_rate": 2.4}
    means = qdq.estimate(log, ["dq_response", "dq_queue"], **options)
    scores = qdq.estimate(
        log, ["dq_response", "dq_queue"], normalise="inverse_propensity", **options
    )
    assert list(means.value) == pytest.approx(list(scores.value), rel=1e-10)


def test_counting_the_arriving_task_is_a_constant_shift_under_group_means_only():
    log = random_log()
    horizon, rate = 7, 2.4
    values = {
        (normalise, queue): qdq.dq_queue(
            log, horizon=horizon, normalise=normalise, queue=queue, arrival_rate=rate
        )
        for normalise in NORMALISATIONS
        for queue in ("in_system", "including_self")
    }
    without, with_self = (values["group_means", q] for q in ("in_system", "including_self"))
    assert with_self.value == pytest.approx(without.value, rel=1e-11)
    assert with_self.standard_error == pytest.approx(without.standard_error, rel=1e-11)
    without, with_self = (values["inverse_propensity", q] for q in ("in_system", "including_self"))
    treated = log.treated[:-horizon]
    shift = horizon / rate * np.mean(treated / 0.5 - ~treated / 0.5)
    assert abs(shift) > 0.01
    assert with_self.value - without.value == pytest.approx(shift, rel=1e-9)
    assert with_self.standard_error > 1.05 * without.standard_error


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("queue", QUEUES)
def test_no_other_weight_has_a_smaller_variance(normalise, queue):
    log = random_log()
    options = {"horizon": 20, "normalise": normalise, "variance": "score"}
    mixed = qdq.dq_mixed(log, queue=queue, **options)
    parts = (mixed.variance_response, mixed.variance_queue, mixed.covariance)
    contrast = inference.WindowContrast(0.0, 0.0, *parts)
    for alpha in mixed.alpha + np.linspace(-2.0, 2.0, 41):
        variance = contrast.mixture_variance(alpha)
        assert mixed.standard_error**2 <= variance * (1 + 1e-12)
    response = qdq.dq_response(log, **options)
    length = qdq.dq_queue(log, queue=queue, **options)
    assert mixed.value == mixed.alpha * response.value + (1 - mixed.alpha) * length.value
    assert mixed.variance_response == pytest.approx(response.standard_error**2, rel=1e-14)
    assert mixed.variance_queue == pytest.approx(length.standard_error**2, rel=1e-14)


def test_the_mixture_of_sums_that_never_vary_is_half_of_each():
    arrival = np.arange(20.0)
    log = qdq.TaskLog(
        arrival=arrival, departure=arrival + 1.5, treated=arrival % 2 == 0, propensity=0.5
    )
    mixed = qdq.dq_mixed(replace(log, skip=3.0), horizon=3)
    assert (mixed.alpha, mixed.value, mixed.standard_error) == (0.5, 0.0, 0.0)


def test_a_horizon_of_one_is_the_naive_estimator_over_the_windows():
    log = random_log()
    short = replace(
        log,
        arrival=log.arrival[:-1],
        departure=log.departure[:-1],
        treated=log.treated[:-1],
        server=None,
        service_time=None,
    )
    assert qdq.dq_response(log, horizon=1).value == pytest.approx(qdq.naive(short).value, rel=1e-12)


def test_simultaneous_arrivals_and_tasks_that_leave_at_once():
    # Tasks 0-2 come at 0; 1 leaves at once; 0 leaves exactly as 3 and 4 come: they don't find it.
    arrival = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 2.0])
    departure = np.array([1.0, 0.0, 4.0, 1.0, 2.5, 2.0])
    found = kernels.tasks_in_system(
        kernels.next_arrival(arrival, departure), np.zeros(0, dtype=np.int64)
    )
    assert found.tolist() == [0, 1, 1, 1, 1, 2]


def test_all_arrivals_at_one_time():
    arrival = np.full(9, 7.0)
    departure = np.array([7.0, 8.0, 7.0, 9.0, 7.0, 7.0, 7.5, 7.0, 8.0])
    found = kernels.tasks_in_system(
        kernels.next_arrival(arrival, departure), np.zeros(0, dtype=np.int64)
    )
    assert found.tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("gap", [5e-324, 1e-300, 1e-12, 1e12, 1e300])
def test_next_arrival_at_extreme_scales(gap):
    rng = np.random.default_rng(4)
    arrival = np.sort(rng.integers(0, 40, size=50)) * gap
    moment = rng.integers(-2, 45, size=200) * gap
    found = kernels.next_arrival(arrival, moment)
    assert np.array_equal(found, np.searchsorted(arrival, moment, side="left"))


@settings(max_examples=100, deadline=None)
@given(
    gaps=st.lists(st.floats(0.0, 1e6) | st.sampled_from([0.0, 1e-9]), min_size=1, max_size=50),
    moments=st.lists(st.floats(-1e3, 1e8), max_size=50),
)
def test_next_arrival_is_a_sorted_search(gaps, moments):
    arrival = np.cumsum(gaps)
    moment = np.array([*moments, *arrival])
    found = kernels.next_arrival(arrival, moment)
    assert np.array_equal(found, np.searchsorted(arrival, moment, side="left"))


def test_variances_keep_their_digits_beside_a_huge_level():
    """A level 1e7 times the spread: sums of raw squares would leave no digit of the variance."""
    rng = np.random.default_rng(5)
    n, horizon = 3000, 10
    noise = rng.integers(0, 2**20, size=n) / 2**20
    arrival = np.arange(n) * 1.0
    log = qdq.TaskLog(arrival=arrival, departure=arrival + 1e7 + noise, treated=rng.random(n) < 0.5)
    sums = np.convolve(noise, np.ones(horizon), "valid")[: n - horizon]
    treated = log.treated[: n - horizon]
    expected = sum(sums[arm].var(ddof=1) / arm.sum() for arm in (treated, ~treated))
    # W = D - A is itself rounded to 2e-9.
    found = qdq.dq_response(log, horizon=horizon, variance="score").standard_error ** 2
    assert found == pytest.approx(expected, rel=1e-7)


# --------------------------------------------------------------------------------------------------
# Naive, split, switchback
# --------------------------------------------------------------------------------------------------


def batch_means_by_loops(log):
    first = int(np.sum(log.arrival < log.arrival[0] + log.skip))
    response, treated = log.response_time[first:], log.treated[first:]
    m1, m0 = response[treated].mean(), response[~treated].mean()
    influence = np.where(
        treated, (response - m1) / treated.sum(), -(response - m0) / (~treated).sum()
    )
    length = 1
    while response.size > 256 * length:
        length *= 2
    blocks = -(-response.size // length)
    length *= -(-blocks // 32)  # blocks to a batch, so that there are at most 32
    edges = [*range(0, response.size, length), response.size]
    parts = [influence[a:b].sum() for a, b in pairwise(edges)]
    share = np.diff(edges) / response.size
    return m1 - m0, sum(u**2 for u in parts) / (1.0 - np.sum(share**2)), len(parts) - 1


@pytest.mark.parametrize(("n", "skip"), [(400, 0.0), (400, 30.0), (45, 0.0), (12, 1.0)])
@pytest.mark.parametrize("design", [qdq.Bernoulli(0.5), None, qdq.ServerSplit(0.5)])
def test_difference_of_means(n, skip, design):
    log = random_log(n, skip=skip, design=design, propensity=None)
    method = qdq.server_split if isinstance(design, qdq.ServerSplit) else qdq.naive
    found = method(log, level=0.9, variance="batch_means")
    value, variance, freedom = batch_means_by_loops(log)
    assert found.value == pytest.approx(value, rel=1e-12)
    assert found.standard_error == pytest.approx(math.sqrt(variance), rel=1e-10)
    assert found.degrees_of_freedom == freedom
    assert found.n_used == np.sum(log.arrival >= log.arrival[0] + skip)
    assert found.confidence_interval() == inference.confidence_interval(
        found.value, found.standard_error, freedom, 0.9
    )


def blocks_of(n, most=256):
    """Return the edges of runs of equal length, a power of two, at most so many."""
    length = 1
    while n > most * length:
        length *= 2
    return [*range(0, n, length), n]


def variance_by_units(kind, influence, estimate):
    """Return a variance from the influence of each unit; `estimate(kept)` leaves units out."""
    n = influence.size
    edges = blocks_of(n)
    if kind == "hac":
        parts = np.array([influence[a:b].sum() for a, b in pairwise(edges)])
        return inference.series(np.diff(edges).astype(float), parts)
    by = -(-(len(edges) - 1) // 32)
    edges = [*edges[:-1:by], n]
    share = np.diff(edges) / n
    if kind == "batch_means":
        parts = [influence[a:b].sum() for a, b in pairwise(edges)]
        return sum(u**2 for u in parts) / (1.0 - np.sum(share**2)), len(parts) - 1
    h, pseudo = 1.0 / share, []
    for a, b in pairwise(edges):
        kept = np.ones(n, bool)
        kept[a:b] = False
        pseudo.append(estimate(np.ones(n, bool)) * n / (b - a))
        pseudo[-1] -= estimate(kept) * (n / (b - a) - 1.0)
    mean = np.sum(pseudo * share)
    return np.mean((pseudo - mean) ** 2 / (h - 1.0)), len(pseudo) - 1


@pytest.mark.parametrize("kind", ["hac", "batch_means", "jackknife"])
@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("method", ["dq_response", "dq_queue", "dq_mixed"])
def test_standard_errors_of_dq_by_units(method, normalise, kind):
    """With the linearised errors of every window, and by leaving windows out."""
    log = random_log(1000, seed=8, propensity=0.5)
    qw, qq, z = sums_of_windows(log, 15, "in_system", "estimated")
    propensity = 0.5 if normalise == "inverse_propensity" else None

    def estimate(kept):
        wdq, qdq_, cov = differences(qw[kept], qq[kept], z[kept], propensity)
        if method != "dq_mixed":
            return wdq if method == "dq_response" else qdq_
        alpha = (cov[1, 1] - cov[0, 1]) / (cov[0, 0] + cov[1, 1] - 2 * cov[0, 1])
        return alpha * wdq + (1.0 - alpha) * qdq_

    found = getattr(qdq, method)(log, horizon=15, normalise=normalise, variance=kind)
    weight = {"dq_response": 1.0, "dq_queue": 0.0}.get(method, found.alpha)
    x = weight * qw + (1.0 - weight) * qq
    if propensity is None:
        influence = np.where(z, (x - x[z].mean()) / z.sum(), -(x - x[~z].mean()) / (~z).sum())
    else:
        score = np.where(z, x / propensity, -x / (1.0 - propensity))
        influence = (score - score.mean()) / x.size
    variance, freedom = variance_by_units(kind, influence, estimate)
    assert found.standard_error == pytest.approx(math.sqrt(variance), rel=1e-7)
    assert found.degrees_of_freedom == freedom
    assert found.variance == kind
    default = getattr(qdq, method)(log, horizon=15, normalise=normalise)
    assert (default.standard_error == found.standard_error) == (kind == "hac")


@pytest.mark.parametrize("kind", ["hac", "batch_means", "jackknife"])
@pytest.mark.parametrize("skip", [0.0, 30.0])
def test_standard_errors_of_naive_by_units(skip, kind):
    log = random_log(1000, seed=9, skip=skip)
    x, z = log.response_time[log.first_counted :], log.treated[log.first_counted :]

    def estimate(kept):
        return x[kept & z].mean() - x[kept & ~z].mean()

    influence = np.where(z, (x - x[z].mean()) / z.sum(), -(x - x[~z].mean()) / (~z).sum())
    variance, freedom = variance_by_units(kind, influence, estimate)
    found = qdq.naive(log, variance=kind)
    assert found.standard_error == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert found.degrees_of_freedom == freedom
    plain = qdq.naive(log, variance="score")
    welch = sum(x[arm].var(ddof=1) / arm.sum() for arm in (z, ~z))
    assert plain.standard_error == pytest.approx(math.sqrt(welch), rel=1e-9)
    assert math.isinf(plain.degrees_of_freedom)


@pytest.mark.parametrize("kind", ["hac", "batch_means", "jackknife"])
def test_standard_errors_of_a_switchback_by_units(kind):
    """The units are the whole periods that hold tasks, in order of time."""
    log = switchback_log(9000, period=5.0)
    whole = [k for k in np.unique(log.period) if k != log.period[-1]]
    rows = []
    for k in whole:
        inside = log.period == k
        rows.append((inside.sum(), log.response_time[inside].sum(), log.treated[inside][0]))
    count, total, z = map(np.array, zip(*rows, strict=True))
    z = z.astype(bool)
    means = [total[arm].sum() / count[arm].sum() for arm in (~z, z)]
    influence = np.where(
        z,
        (total - count * means[1]) / count[z].sum(),
        -(total - count * means[0]) / count[~z].sum(),
    )
    edges = blocks_of(count.size)
    if kind != "hac":
        by = -(-(len(edges) - 1) // 32)
        edges = [*edges[:-1:by], count.size]
    units = np.array([count[a:b].sum() for a, b in pairwise(edges)], dtype=float)
    parts = np.array([influence[a:b].sum() for a, b in pairwise(edges)])
    if kind == "hac":
        variance, freedom = inference.series(units, parts)
    elif kind == "batch_means":
        variance, freedom = inference.batch_means(units, parts)
    else:
        pseudo, h = [], units.sum() / units
        for (a, b), share in zip(pairwise(edges), h, strict=True):
            kept = np.ones(count.size, bool)
            kept[a:b] = False
            arms = [total[kept & arm].sum() / count[kept & arm].sum() for arm in (~z, z)]
            pseudo.append(share * (means[1] - means[0]) - (share - 1.0) * (arms[1] - arms[0]))
        away = np.array(pseudo) - np.sum(pseudo / h)
        variance, freedom = np.mean(away**2 / (h - 1.0)), len(pseudo) - 1
    found = qdq.switchback(log, variance=kind)
    assert found.standard_error == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert found.degrees_of_freedom == freedom


def switchback_log(n=3000, period=20.0, outside=False, seed=6, **fields):
    log = random_log(n, seed=seed, design=None, propensity=None, **fields)
    number = np.floor(log.arrival / period).astype(np.int64)
    coins = np.random.default_rng(seed).random(number.max() + 1) < 0.5
    return replace(
        log,
        period=number + 3 * outside,  # from outside, periods may be numbered from anywhere
        treated=coins[number],
        design=None if outside else qdq.Switchback(period),
        propensity=None if outside else 0.5,
    )


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("washout", [0.0, 4.0])
@pytest.mark.parametrize("skip", [0.0, 50.0])
def test_switchback_by_loops(outside, washout, skip):
    log = switchback_log(outside=outside, skip=skip)
    clusters = {}
    for k in range(log.n_tasks):
        number = log.period[k]
        begin = log.arrival[log.period == number][0] if outside else 20.0 * number
        dropped = log.arrival[k] < begin + washout or number == log.period[-1]
        if not dropped and log.arrival[k] >= log.arrival[0] + skip:
            clusters.setdefault((number, bool(log.treated[k])), []).append(log.response_time[k])
    means, variances, sizes = [], [], []
    for arm in (False, True):
        cells = [np.array(c) for (_, z), c in clusters.items() if z == arm]
        total = sum(c.size for c in cells)
        mean = sum(c.sum() for c in cells) / total
        means.append(mean)
        factor = len(cells) / (len(cells) - 1)
        variances.append(factor * sum(((c - mean).sum() / total) ** 2 for c in cells))
        sizes.append(len(cells))
    assert min(sizes) >= 10
    found = qdq.switchback(log, washout=washout, variance="score")
    assert found.value == pytest.approx(means[1] - means[0], rel=1e-12)
    assert found.standard_error == pytest.approx(math.sqrt(sum(variances)), rel=1e-10)
    welch = sum(variances) ** 2 / sum(v**2 / (k - 1) for v, k in zip(variances, sizes, strict=True))
    assert found.degrees_of_freedom == pytest.approx(welch)
    assert found.n_used == sum(len(c) for c in clusters.values())


def test_methods_may_come_from_a_generator():
    names = ["dq_mixed", "naive"]
    frame = qdq.estimate(random_log(), (name for name in names), horizon=9)
    assert list(frame.method) == names


def test_the_last_period_is_dropped():
    log = switchback_log()
    changed = log.departure.copy()
    changed[log.period == log.period[-1]] += 100.0
    assert qdq.switchback(replace(log, departure=changed)).value == qdq.switchback(log).value


@pytest.mark.parametrize("shift", [-1e4, 2.0**30])
def test_washout_does_not_go_by_another_clock(shift):
    # Periods of a log from outside need not be counted from its time 0, though its design is known.
    log = switchback_log()
    moved = replace(log, arrival=log.arrival + shift, departure=log.departure + shift)
    found = qdq.switchback(moved, washout=4.0)
    right = qdq.switchback(replace(moved, design=None), washout=4.0)
    assert (found.n_used, found.value) == (right.n_used, right.value)
    assert found.n_used < qdq.switchback(moved).n_used


def test_few_periods_are_warned_of():
    log = switchback_log(n=400)
    with pytest.warns(UserWarning, match=r"rough, with . control and . treated whole") as seen:
        qdq.switchback(log)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="10 are advised") as seen:
        qdq.estimate(log)
    assert seen[0].filename == __file__


# --------------------------------------------------------------------------------------------------
# The face: frames, defaults, printing
# --------------------------------------------------------------------------------------------------


def test_estimate_has_a_row_for_each_method_of_the_design():
    log = random_log()
    frame = qdq.estimate(log, horizon=20, queue="waiting", arrival_rate=2.4, level=0.8)
    assert list(frame.columns) == [
        "method",
        "value",
        "standard_error",
        "low",
        "high",
        "horizon",
        "n_used",
        "alpha",
        "normalise",
        "queue",
        "arrival_rate",
    ]
    rates = {"queue": "waiting", "arrival_rate": 2.4}
    singles = [
        qdq.naive(log, level=0.8),
        qdq.dq_response(log, horizon=20, level=0.8),
        qdq.dq_queue(log, horizon=20, level=0.8, **rates),
        qdq.dq_mixed(log, horizon=20, level=0.8, **rates),
    ]
    assert [e.method for e in singles] == list(frame.method)
    expected = pd.concat([e.to_frame() for e in singles], ignore_index=True)
    pd.testing.assert_frame_equal(frame, expected)
    row = frame.iloc[3]
    assert (row.horizon, row.n_used, row.normalise) == (20, 380, "group_means")
    assert (row.queue, row.arrival_rate) == ("waiting", 2.4)
    assert row.low < row.value < row.high
    first = frame.iloc[0]
    assert first.horizon is pd.NA
    assert math.isnan(first.alpha)
    assert (first.normalise, first.queue, first.arrival_rate) == (None, None, None)


@pytest.mark.parametrize("method", METHODS)
def test_each_estimate_bears_the_name_of_its_function(method):
    logs_of = {"switchback": switchback_log()}
    logs_of["server_split"] = random_log(design=qdq.ServerSplit(0.5), propensity=None)
    log = logs_of.get(method, random_log())
    options = {"horizon": 20} if method.startswith("dq") else {}
    found = getattr(qdq, method)(log, **options)
    assert found.method == method
    frame = qdq.estimate(log, [method], horizon=20)
    pd.testing.assert_frame_equal(frame, found.to_frame())


def test_methods_default_to_those_of_the_design():
    assert list(qdq.estimate(switchback_log()).method) == ["switchback"]
    assert list(qdq.estimate(switchback_log(outside=True)).method) == ["switchback"]
    split = random_log(design=qdq.ServerSplit(0.5), propensity=None)
    assert list(qdq.estimate(split).method) == ["server_split"]
    outside = random_log(design=None, propensity=None)
    bernoulli = ["naive", "dq_response", "dq_queue", "dq_mixed"]
    assert list(qdq.estimate(outside, horizon=9).method) == bernoulli


def test_the_horizon_defaults_to_thirty_mean_service_times_of_arrivals():
    scenario = qdq.Scenario(n_servers=SERVERS, arrivals=qdq.Poisson(0.7), control=qdq.PowerOfD(1))
    log = random_log(scenario=scenario)
    assert qdq.dq_response(log).horizon == 63  # 30 * 3 * 0.7 is 62.99999999999999 in floating point
    log = replace(log, scenario=None)
    rate = 399 / (log.arrival[-1] - log.arrival[0])
    assert qdq.dq_response(log).horizon == math.floor(30 * rate * log.service_time.mean())


def test_the_rate_defaults_to_the_scenarios_under_periodic_arrivals_only():
    log = random_log()
    assert qdq.dq_queue(log, horizon=9).arrival_rate == "estimated"
    for arrivals, default in (
        (qdq.Poisson(0.8), "estimated"),
        (qdq.ArrivalTrace(log.arrival), "estimated"),
        (qdq.Periodic(0.5, 0.9, 30.0), "scenario"),
    ):
        scenario = qdq.Scenario(
            n_servers=SERVERS, arrivals=arrivals, control=qdq.PowerOfD(1), allow_unstable=True
        )
        simulated = replace(log, scenario=scenario)
        found = qdq.dq_queue(simulated, horizon=9)
        assert found.arrival_rate == default
        assert found.value == qdq.dq_queue(simulated, horizon=9, arrival_rate=default).value
    assert qdq.dq_queue(simulated, horizon=9, queue="time_average").arrival_rate is None
    assert qdq.dq_queue(log, horizon=9, arrival_rate=lambda t: 2.0).arrival_rate == "function"


def test_printing():
    mixed = qdq.dq_mixed(random_log(), horizon=20)
    assert repr(mixed).startswith("dq_mixed: ")
    for part in ("95 % interval [", "n_used=380", "horizon=20", "in_system", "rate=estimated"):
        assert part in repr(mixed)
        assert part in mixed._repr_html_() or part.startswith("95")
    assert "\n" not in repr(mixed)
    assert "alpha" not in repr(qdq.naive(random_log()))


def test_an_estimate_can_change_neither_value_nor_shape():
    found = qdq.naive(random_log())
    with pytest.raises(AttributeError):
        found.value = 0.0
    assert not hasattr(found, "__dict__")
    wide = found.confidence_interval(0.999)
    assert wide.low < found.low < found.high < wide.high
    assert (found.low, found.high) == tuple(found.confidence_interval())


# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(log=logs(), horizon=st.integers(1, 7), by_duration=st.booleans())
def test_compiled_kernels_equal_their_python_bit_for_bit(log, horizon, by_duration):
    def both(name, *arguments):
        """Run a kernel both ways, each on arguments of its own; compare these and the results."""
        kernel = getattr(kernels, name)
        outcomes = []
        for function in (kernel, kernel.py_func):
            mine = [np.copy(a) if isinstance(a, np.ndarray) else a for a in arguments]
            outcomes.append([np.asarray(x) for x in (*mine, function(*mine)) if x is not None])
        for a, b in zip(*outcomes, strict=True):
            assert a.tobytes() == b.tobytes()
            assert a.dtype == b.dtype
        return outcomes[0][-1]

    carried = log.carried_over[:, 2].copy()
    leaves = both("next_arrival", log.arrival, log.departure)
    carried_leaves = both("next_arrival", log.arrival, carried)
    found = both("tasks_in_system", leaves, carried_leaves)
    times = (log.arrival[0], log.arrival, log.departure)
    areas = both("area_between_arrivals", *times, leaves, carried, carried_leaves, found)
    both("start_of_service", log.arrival, log.departure, log.server, 0.25, np.zeros(SERVERS))
    horizon = min(horizon, log.n_tasks - log.first_counted - 1)
    for costs in (found.astype(float), areas):
        stretch = (log.first_counted, log.n_tasks - horizon, horizon, by_duration)
        columns = (log.response_time, costs, log.arrival, log.treated)
        both("add_windows", *columns, *stretch, np.zeros(5), np.zeros((2, 6)))
        windows = log.n_tasks - horizon - log.first_counted
        stretch = (0, windows, log.first_counted, horizon, by_duration, np.zeros(5))
        both("add_windows_to_blocks", *columns, *stretch, 4, np.zeros((windows // 4 + 1, 2, 6)))
    tasks = log.n_tasks - log.first_counted
    stretch = (0, tasks, log.first_counted, 1.5)
    both("add_tasks", *columns[::3], *stretch, 4, np.zeros((tasks // 4 + 1, 2, 3)))
    period = np.floor(log.arrival / 2.0).astype(np.int64)
    kept = log.arrival - 2.0 * period >= 0.5
    columns = (log.response_time, period % 2 == 0, period, kept)
    both("close_periods", *columns, np.zeros(7), np.zeros((log.n_tasks, 3)))


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------

OUTSIDE = {"design": None, "propensity": None}
UNEQUAL = qdq.Scenario(n_servers=SERVERS, service_rates=[1.0, 1.0, 2.0])
TRACE = qdq.Scenario(n_servers=SERVERS, arrivals=qdq.ArrivalTrace(np.arange(1.0, 400.0)))


def one_arm(design, treated, n=40):
    return replace(random_log(n, **OUTSIDE), treated=np.full(n, treated), design=design)


def mixed_period():
    log = switchback_log()
    treated = log.treated.copy()
    treated[0] = ~treated[0]
    return replace(log, treated=treated)


def backwards():
    """Return a log whose first task leaves its server after the second."""
    log = random_log(40, **OUTSIDE)
    departure = log.departure.copy()
    departure[0] += 1e6
    return replace(log, departure=departure, service_time=None)


REFUSED = {
    "log": (
        lambda: qdq.naive(pd.DataFrame()),
        TypeError,
        "log is a DataFrame: it must be a TaskLog",
    ),
    "level 1": (lambda: qdq.naive(random_log(), level=1.0), ValueError, "level=1.0 is not allowed"),
    "level 95": (
        lambda: qdq.estimate(random_log(), level=95),
        ValueError,
        "level=95 is not allowed: level must be strictly between 0 and 1",
    ),
    "level text": (lambda: qdq.naive(random_log(), level="95%"), TypeError, "level='95%' is not a"),
    "level of interval": (
        lambda: qdq.naive(random_log()).confidence_interval(0.0),
        ValueError,
        "level=0.0 is not allowed",
    ),
    "horizon 0": (
        lambda: qdq.dq_response(random_log(), horizon=0),
        ValueError,
        "horizon=0 is not allowed: horizon must be a number of arrivals >= 1",
    ),
    "horizon fraction": (
        lambda: qdq.dq_queue(random_log(), horizon=2.5),
        ValueError,
        "horizon=2.5 is not allowed",
    ),
    "horizon text": (
        lambda: qdq.dq_mixed(random_log(), horizon="480"),
        ValueError,
        "horizon='480' is not allowed: horizon must be a number of arrivals >= 1, or one of 'rmse'",
    ),
    "horizon too long": (
        lambda: qdq.dq_response(random_log(), horizon=400),
        ValueError,
        "horizon=400 is not allowed: horizon must be below the number of counted tasks, 400",
    ),
    "horizon too long for what is counted": (
        lambda: qdq.dq_response(replace(random_log(), skip=100.0), horizon=399),
        ValueError,
        "below the number of counted tasks, 1",
    ),
    "horizon by default too long": (
        lambda: qdq.dq_response(random_log(40)),
        ValueError,
        "below the number of counted tasks, 40: give a horizon",
    ),
    "normalise": (
        lambda: qdq.dq_response(random_log(), horizon=9, normalise="ipw"),
        ValueError,
        "normalise='ipw' is not allowed: normalise must be one of 'group_means', 'inverse",
    ),
    "queue": (
        lambda: qdq.dq_queue(random_log(), horizon=9, queue="waiting_room"),
        ValueError,
        "queue='waiting_room' is not allowed: queue must be one of 'in_system', 'including_self', ",
    ),
    "variance": (
        lambda: qdq.naive(random_log(), variance="newey_west"),
        ValueError,
        "variance='newey_west' is not allowed: variance must be one of 'score', 'hac', ",
    ),
    "queue None": (lambda: qdq.estimate(random_log(), queue=None), ValueError, "queue=None is not"),
    "rate name": (
        lambda: qdq.dq_queue(random_log(), horizon=9, arrival_rate="known"),
        ValueError,
        "arrival_rate='known' is not allowed: arrival_rate must be a total arrival rate > 0, ",
    ),
    "rate zero": (
        lambda: qdq.dq_queue(random_log(), horizon=9, arrival_rate=0.0),
        ValueError,
        "arrival_rate=0.0 is not allowed",
    ),
    "rate infinite": (
        lambda: qdq.dq_queue(random_log(), horizon=9, arrival_rate=math.inf),
        ValueError,
        "arrival_rate=inf is not allowed",
    ),
    "rate list": (
        lambda: qdq.dq_queue(random_log(), horizon=9, arrival_rate=[1.0]),
        TypeError,
        "is not a number: arrival_rate must be",
    ),
    "rate function negative": (
        lambda: qdq.dq_queue(random_log(), horizon=9, arrival_rate=lambda t: 1.0 - t),
        ValueError,
        r"arrival_rate\(t\) gives -.* at time .*: a rate must be positive and finite",
    ),
    "rate function not a number": (
        lambda: qdq.dq_queue(random_log(), horizon=9, arrival_rate=lambda t: math.nan),
        ValueError,
        r"arrival_rate\(t\) gives nan at time",
    ),
    "rate function of wrong shape": (
        lambda: qdq.dq_queue(random_log(), horizon=9, arrival_rate=lambda t: [1.0, 2.0]),
        ValueError,
        r"arrival_rate\(t\) gives shape \(2,\) for one time: it must be a number",
    ),
    "rate of no scenario": (
        lambda: qdq.dq_queue(random_log(), horizon=9, arrival_rate="scenario"),
        ValueError,
        "arrival_rate='scenario' needs a log with a scenario",
    ),
    "rate of a trace": (
        lambda: qdq.dq_queue(random_log(scenario=TRACE), horizon=9, arrival_rate="scenario"),
        ValueError,
        "needs arrivals with a rate, and an ArrivalTrace has none",
    ),
    "rate of one instant": (
        lambda: qdq.dq_queue(
            qdq.TaskLog(
                arrival=np.zeros(9), departure=np.ones(9), treated=np.arange(9) % 2, propensity=0.5
            ),
            horizon=2,
        ),
        ValueError,
        "can't be estimated: all arrivals are at the same time",
    ),
    "washout negative": (
        lambda: qdq.switchback(switchback_log(), washout=-1.0),
        ValueError,
        "washout=-1.0 is not allowed: washout must be a time >= 0",
    ),
    "washout too long": (
        lambda: qdq.switchback(switchback_log(), washout=20.0),
        ValueError,
        "washout=20.0 is not allowed: washout must be below the period, 20",
    ),
    "methods unknown": (
        lambda: qdq.estimate(random_log(), ["naive", "dq"]),
        ValueError,
        "methods='dq' is not allowed: methods must be one of 'naive', 'dq_response'",
    ),
    "methods text": (
        lambda: qdq.estimate(random_log(), "naive"),
        TypeError,
        r"methods='naive' is one name: methods must be a list of names, \['naive'\]",
    ),
    "methods of no use": (
        lambda: qdq.estimate(random_log(), 5),
        TypeError,
        "methods=5 is not a list of names, or None",
    ),
    "periods out of order": (
        lambda: qdq.switchback(replace(switchback_log(), period=-switchback_log().period)),
        ValueError,
        r"periods numbered in order of time, and task \d+ is of period -1 after one of period 0",
    ),
    "methods empty": (
        lambda: qdq.estimate(random_log(), []),
        ValueError,
        r"methods=\[\] is empty: give names out of naive, dq_response",
    ),
    "propensity unknown": (
        lambda: qdq.dq_response(random_log(**OUTSIDE), horizon=9, normalise="inverse_propensity"),
        ValueError,
        "normalise='inverse_propensity' needs the known probability of treatment",
    ),
    "propensity 0": (
        lambda: qdq.dq_response(
            replace(one_arm(None, False), propensity=0.0),
            horizon=9,
            normalise="inverse_propensity",
        ),
        ValueError,
        "needs a propensity strictly between 0 and 1, not the log's 0.0",
    ),
    "waiting with unequal rates": (
        lambda: qdq.estimate(random_log(scenario=UNEQUAL), horizon=9, queue="waiting"),
        ValueError,
        "queue='waiting' is not allowed in dq_mixed when service rates differ",
    ),
    "waiting without servers": (
        lambda: qdq.dq_queue(
            replace(random_log(), server=None, service_time=None), horizon=9, queue="waiting"
        ),
        ValueError,
        "queue='waiting' needs the start of service, and the log has neither the column service_ti",
    ),
    "waiting in another order": (
        lambda: qdq.dq_queue(backwards(), horizon=9, queue="waiting"),
        ValueError,
        "needs FCFS servers, and task .* leaves server .* at .*, before it could start at",
    ),
    "dq of a switchback": (
        lambda: qdq.dq_mixed(switchback_log(), horizon=9),
        ValueError,
        r"dq_mixed needs a log of design Bernoulli, and this one is of design Switchback\(",
    ),
    "dq of a switchback from outside": (
        lambda: qdq.dq_mixed(switchback_log(outside=True), horizon=9),
        ValueError,
        "this one is from outside with the column period, a switchback: use switchback",
    ),
    "dq of a split": (
        lambda: qdq.dq_queue(random_log(design=qdq.ServerSplit(), propensity=None), horizon=9),
        ValueError,
        r"dq_queue needs .* this one is of design ServerSplit\(share=0.5\): use server_split",
    ),
    "dq of control": (
        lambda: qdq.dq_response(one_arm(qdq.AllControl(), False), horizon=9),
        ValueError,
        r"of design AllControl\(\): it holds one arm only, and no method applies",
    ),
    "estimate of treatment": (
        lambda: qdq.estimate(one_arm(qdq.AllTreatment(), True), horizon=9),
        ValueError,
        r"this log is of design AllTreatment\(\): it holds one arm only",
    ),
    "naive of a switchback": (
        lambda: qdq.naive(switchback_log()),
        ValueError,
        "naive needs a log of design Bernoulli, .*: use switchback",
    ),
    "switchback of Bernoulli": (
        lambda: qdq.switchback(random_log()),
        ValueError,
        "switchback needs a log of design Switchback, .*: use naive or dq_response or dq_queue or",
    ),
    "split of a log from outside": (
        lambda: qdq.server_split(random_log(**OUTSIDE)),
        ValueError,
        "server_split needs a log of design ServerSplit, and this one is from outside: use naive",
    ),
    "one arm": (
        lambda: qdq.naive(one_arm(None, True)),
        ValueError,
        "none of the 40 counted tasks is control: naive needs both arms",
    ),
    "one task": (
        lambda: qdq.naive(
            replace(random_log(), skip=random_log().arrival[-1] - random_log().arrival[0])
        ),
        ValueError,
        "none of the 1 counted tasks is treated: naive needs both arms",
    ),
    "one arm of windows": (
        lambda: qdq.dq_response(one_arm(None, False), horizon=9),
        ValueError,
        "only 0 of the 31 windows of horizon 9 begin with a treated task: at least 2 are needed",
    ),
    "switchback without periods": (
        lambda: qdq.switchback(replace(switchback_log(), period=None)),
        ValueError,
        "switchback needs the column period",
    ),
    "periods of both arms": (
        lambda: qdq.switchback(mixed_period()),
        ValueError,
        "period 0 holds tasks of both arms",
    ),
    "too few periods": (
        lambda: qdq.switchback(switchback_log(n=130)),
        ValueError,
        "needs at least 2 periods of each arm, and the log has .* control and .* treated whole",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_call_says_what_would_be_right(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_what_a_method_has_no_use_for_is_not_in_its_way():
    log = random_log()
    bare = replace(log, server=None, service_time=None, design=None, propensity=None)
    # Response sums need neither starts of service nor a rate.
    found = qdq.estimate(bare, ["dq_response"], horizon=9, queue="waiting", arrival_rate="scenario")
    assert found.value[0] == qdq.dq_response(bare, horizon=9).value
    assert (found.queue[0], found.arrival_rate[0]) == (None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(qdq.estimate(switchback_log(), horizon=10**9, washout=1.0).method) == [
            "switchback"
        ]


# --------------------------------------------------------------------------------------------------
# A real log
# --------------------------------------------------------------------------------------------------


def test_the_haproxy_experiment():
    """The published figures of the shipped log, and ten lines of numpy that agree with them."""
    log = qdq.TaskLog.read(HAPROXY)
    frame = qdq.estimate(log, horizon=480).set_index("method")
    assert list(1000 * frame.value) == pytest.approx([-23.373, -44.735, -42.333, -46.735], abs=5e-4)

    a, d, z, horizon = log.arrival, log.departure, log.treated, 480
    n = a.size
    found = np.arange(n) - np.searchsorted(np.sort(d), a, side="right")
    w, q = (np.concatenate([[0.0], np.cumsum(x)]) for x in (d - a, found))
    i = np.arange(n - horizon)
    qw = w[i + horizon] - w[i]
    qq = (q[i + horizon + 1] - q[i + 1]) * (a[-1] - a[0]) / (n - 1)
    t = z[i]
    v = sum(np.cov(qw[arm], qq[arm]) / arm.sum() for arm in (t, ~t))
    alpha = (v[1, 1] - v[0, 1]) / (v[0, 0] + v[1, 1] - 2 * v[0, 1])
    wdq, qdq_ = (x[t].mean() - x[~t].mean() for x in (qw, qq))
    naive = (d - a)[z].mean() - (d - a)[~z].mean()
    assert list(frame.value) == pytest.approx(
        [naive, wdq, qdq_, alpha * wdq + (1 - alpha) * qdq_], rel=1e-7
    )


def test_rates_are_all_tried():
    assert set(RATES) < set(RATE_READINGS)
