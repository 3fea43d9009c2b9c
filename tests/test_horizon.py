"""Rules for the horizon, against processes whose memory and whose best horizon are known."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter

import qdq
from qdq import estimators, horizon, inference
from qdq.horizon import Decay, Memory, choose, grid

# --------------------------------------------------------------------------------------------------
# The grid
# --------------------------------------------------------------------------------------------------


def test_grid_by_hand():
    assert grid(32 * 30).tolist() == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert grid(32 * 24).tolist()[-1] == 24
    assert grid(32 * 24 - 1).tolist()[-1] == 16
    assert grid(10**6, most=7).tolist() == [1, 2, 3, 4, 6]
    assert grid(2).tolist() == [1]


@settings(max_examples=200)
@given(n=st.integers(1, 10**9), most=st.none() | st.floats(1.0, 1e8))
def test_grid_is_the_numbers_of_two_bits_at_most(n, most):
    found = grid(n, math.inf if most is None else most).tolist()
    longest = max(1, min(n // 32, n if most is None else int(most)))
    powers = [2**k for k in range(40)]
    assert found == sorted(x for x in {*powers, *(3 * x for x in powers)} if x <= longest)
    assert all(b <= 2 * a for a, b in pairwise(found))


# --------------------------------------------------------------------------------------------------
# How long queues remember
# --------------------------------------------------------------------------------------------------


def variances(horizons, times, weights, level=0.0):
    """Variance of sums over L of a process whose r(h) is a sum of exponentials, plus white noise.

    ``L r(0) + 2 sum((L - h) r(h), h < L)``, with ``r(h) = sum(weights * exp(-h / times))``.
    """
    found = []
    for span in horizons:
        h = np.arange(1, span)
        r = np.exp(-np.divide.outer(h, times)) @ weights
        found.append(span * (np.sum(weights) + level) + 2.0 * np.sum((span - h) * r))
    return np.array(found)


def left_after(spans, times, weights):
    """Share of ``2 sum(r(h), h >= 1)`` that comes after L."""
    ratio = np.exp(-1.0 / np.asarray(times))
    tails = np.array([weights * ratio ** (span + 1) / (1.0 - ratio) for span in spans])
    return tails.sum(axis=1) / np.sum(weights * ratio / (1.0 - ratio))


@pytest.mark.parametrize("time", [5.0, 20.0, 100.0])
def test_decay_of_an_autoregression(time):
    """Slopes rise as ``1 - exp(-L / time)``: the share that is left is known."""
    horizons = grid(10**7, most=30 * time)
    weights, times = np.array([1.0]), np.array([time])
    decay = Decay(horizons, variances(horizons, times, weights), 10**7)
    spans = np.array([0.3, 0.7, 1.5, 3.0]) * time
    exact = np.exp(-spans / time)
    np.testing.assert_allclose(decay.remaining_at(spans), exact, atol=0.03)
    # By the sum of what comes later, it is the same to the width of a step.
    np.testing.assert_allclose(left_after(spans, times, weights), exact, atol=1e-9)


def test_decay_of_two_times():
    horizons = grid(10**8, most=20_000)
    times, weights = np.array([10.0, 300.0]), np.array([1.0, 0.05])
    decay = Decay(horizons, variances(horizons, times, weights), 10**8)
    spans = np.array([3, 10, 50, 200, 600])
    exact = left_after(spans, times, weights)
    assert exact[2] > 0.4  # the slow part has the weight 0.6
    np.testing.assert_allclose(decay.remaining_at(spans), exact, atol=0.04)


def test_decay_does_not_take_noise_for_memory():
    """White noise in the responses, as of service times: it raises all slopes alike."""
    horizons = grid(10**6, most=5_000)
    decay = Decay(horizons, variances(horizons, np.array([1e-3]), np.array([1.0])), 10**6)
    assert decay.remaining_at(10) < 0.01
    with_noise = variances(horizons, np.array([30.0]), np.array([1.0]), level=2.0)
    decay = Decay(horizons, with_noise, 10**6)
    # Of the slopes, which rise to 2 + 60, the noise is there at once.
    slopes = np.array([60.0 / 62.0 * math.exp(-span / 30.0) for span in (15, 30, 60, 120)])
    np.testing.assert_allclose(decay.remaining_at([15, 30, 60, 120]), slopes, atol=0.03)


def test_decay_of_a_simulated_autoregression():
    """Of 200,000 steps of memory 20: the share at 20 is known to some per cent."""
    n, time = 200_000, 20.0
    rho = math.exp(-1.0 / time)
    found = []
    for seed in range(12):
        x = lfilter([1.0], [1.0, -rho], np.random.default_rng(seed).standard_normal(n))
        horizons = grid(n, most=20 * time)
        total = np.concatenate(([0.0], np.cumsum(x - x.mean())))
        variance = [np.mean((total[span:] - total[:-span]) ** 2) for span in horizons]
        found.append(Decay(horizons, np.array(variance), n).remaining_at([20, 60]))
    error = np.std(found, axis=0, ddof=1) / math.sqrt(12)
    assert (error < 0.02).all()
    assert (np.abs(np.mean(found, axis=0) - np.exp([-1.0, -3.0])) < 4.5 * error + 0.02).all()


@settings(max_examples=25, deadline=None)
@given(
    slopes=st.lists(st.floats(-5.0, 10.0), min_size=7, max_size=7),
    first=st.floats(0.01, 10.0),
    spans=st.lists(st.floats(0.0, 1e6), min_size=2, max_size=9).map(sorted),
)
def test_what_remains_falls_from_one_to_zero(slopes, first, spans):
    horizons = grid(32 * 30)
    variance = np.cumsum(np.array([first, first, *slopes]) * np.diff(horizons, prepend=0))
    found = Decay(horizons, variance, 960).remaining_at(spans)
    assert found.shape == (len(spans),)
    assert ((found >= 0.0) & (found <= 1.0 + 1e-12)).all()
    assert (np.diff(found) <= 1e-12).all()
    one = Decay(horizons, variance, 960).remaining_at(spans[0])
    assert isinstance(one, float)
    assert one == found[0]


def test_nothing_known_is_nothing_forgotten():
    short = Decay(np.array([1, 2]), np.array([1.0, 2.0]), 64)
    assert short.remaining_at([1, 100]).tolist() == [1.0, 1.0]
    still = Decay(grid(960), np.zeros(9), 960)
    assert still.remaining_at([1, 100]).tolist() == [1.0, 1.0]
    # Sums that stand still at first leave something to learn all the same.
    late = Decay(grid(960), np.array([1.0, 1.0, 1.0, 2.0, 5.0, 9.0, 20.0, 30.0, 60.0]), 960)
    assert np.isfinite(late.remaining_at([1, 10, 30])).all()


def test_memory_of_a_log():
    scenario = qdq.Scenario(n_servers=4, arrivals=qdq.Poisson(0.7))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 50_000, seed=1)
    decay = Memory(log).decay
    assert decay.horizons.tolist() == grid(50_000).tolist()
    response = log.response_time - log.response_time.mean()
    for place in (0, 4, 9):
        span = decay.horizons[place]
        sums = np.convolve(response, np.ones(span), "valid")
        # Some 4,096 of the windows, of which 50,000 / span are side by side.
        assert decay.variance[place] == pytest.approx(np.mean(sums**2), rel=0.25)
    mixed = qdq.dq_mixed(log, horizon=50)
    assert mixed.truncation == decay.remaining_at(50)
    assert 0.0 < qdq.dq_mixed(log, horizon=200).truncation < mixed.truncation < 1.0
    assert qdq.naive(log).truncation is None
    # The same numbers make the same estimate, and a pickled one leaves the log behind.
    assert mixed == qdq.dq_mixed(log, horizon=50)
    pickled = pickle.dumps(mixed)
    assert len(pickled) < 10_000 < log.n_tasks
    assert pickle.loads(pickled).truncation == mixed.truncation
    # Higher load, longer memory.
    busier = scenario.replace(arrivals=qdq.Poisson(0.9))
    slow = Memory(qdq.simulate(busier, qdq.Bernoulli(0.5), 50_000, seed=1)).decay
    assert slow.remaining_at(50) > decay.remaining_at(50) + 0.1


# --------------------------------------------------------------------------------------------------
# The choice
# --------------------------------------------------------------------------------------------------

SPANS = grid(10**6, most=3000)


def system(slope, direct, time, unit, weight):
    """Return what `choose` is given of a system of known slope, with variances ``unit * L**2``."""
    left = np.exp(-SPANS / time)
    remaining = np.column_stack((left, left))
    contrasts = []
    for span, share in zip(SPANS, left, strict=True):
        response = slope - (slope - 0.5 * direct) * share
        if span == 1:
            response = direct  # by which the naive difference is known
        queue = slope * (1.0 - share)
        v = unit * float(span)
        contrasts.append(inference.WindowContrast(response, queue, v, v, 0.0))
    weights = np.full(SPANS.size, weight)
    variance = np.array([c.mixture_variance(weight) for c in contrasts])
    return weights, contrasts, remaining, variance


def slope_known(direct, contrasts, remaining):
    """Return mean and variance of the slope, as the rules are documented to see it."""
    prior = 2.0 * direct, (2.0 * direct) ** 2
    freed = []
    for contrast, (t, _) in zip(contrasts, remaining, strict=True):
        if t < 0.5:
            value = (contrast.response - 0.5 * direct * t) / (1.0 - t)
            freed.append((contrast.variance_response / (1.0 - t) ** 2, value))
    if not freed:
        return prior
    variance, value = min(freed)
    precision = 1.0 / prior[1] + 1.0 / variance
    return (prior[0] / prior[1] + value / variance) / precision, 1.0 / precision


def squared_error(rule, weight, direct, contrasts, remaining):
    """Return the mean squared bias at each horizon, over the slope's law."""
    mean, variance = slope_known(direct, contrasts, remaining)
    found = []
    for t_w, t_q in remaining:
        # The estimate is low by: weight (B - D/2) T_w + (1 - weight) B T_q; and full deployment
        # is a tenth of B further.
        by_slope = weight * t_w + (1.0 - weight) * t_q + (0.1 if rule == "rmse" else 0.0)
        found.append((by_slope * mean - weight * 0.5 * direct * t_w) ** 2 + by_slope**2 * variance)
    return np.array(found)


@pytest.mark.parametrize("weight", [1.0, 0.0, 0.4, 1.8])
@pytest.mark.parametrize("unit", [1e-8, 1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("time", [10.0, 150.0])
def test_choices_by_the_formula(time, unit, weight):
    direct, slope = -0.5, -1.3
    weights, contrasts, remaining, variance = system(slope, direct, time, unit, weight)
    given_all = (weights, contrasts, remaining, variance)
    error = squared_error("rmse", weight, direct, contrasts, remaining) + variance
    assert choose("rmse", *given_all) == int(np.argmin(error))
    bias = squared_error("coverage", weight, direct, contrasts, remaining)
    small = bias <= 0.0625 * variance
    expected = int(np.argmax(small)) if small.any() else len(SPANS) - 1
    assert choose("coverage", *given_all) == expected


@pytest.mark.parametrize("unit", [3e-6, 1e-5, 1e-4])
def test_the_least_error_where_the_slope_is_well_known(unit):
    """Where slope and memory are known, the choice is that of the true mean squared error."""
    time, direct, slope = 100.0, -0.5, -1.3
    given_all = system(slope, direct, time, unit, 1.0)
    truth = 1.1 * slope  # the effect of full deployment, as the rule thinks of it
    expectation = np.array([contrast.response for contrast in given_all[1]])
    expectation[0] = slope - (slope - 0.5 * direct) * given_all[2][0, 0]
    error = (expectation - truth) ** 2 + given_all[3]
    best, chosen = int(np.argmin(error)), choose("rmse", *given_all)
    assert 1 < best < len(SPANS) - 1
    assert error[chosen] <= 1.1 * error[best]
    assert abs(chosen - best) <= 2


def test_longer_where_there_is_less_noise_and_where_queues_remember_longer():
    by_noise = [choose("rmse", *system(-1.3, -0.5, 100.0, unit, 1.0)) for unit in (1, 1e-3, 1e-6)]
    assert by_noise == sorted(by_noise)
    assert by_noise[0] < by_noise[-1]
    for rule in horizon.RULES:
        by_time = [choose(rule, *system(-1.3, -0.5, t, 1e-5, 1.0)) for t in (5.0, 50.0, 500.0)]
        assert by_time == sorted(by_time)
        assert by_time[0] < by_time[-1]


def test_nothing_known_gives_the_prior_only():
    weights, contrasts, _, variance = system(-1.3, -0.5, 100.0, 1e-4, 1.0)
    whole = np.ones((len(SPANS), 2))
    assert choose("rmse", weights, contrasts, whole, variance) == 0
    assert choose("coverage", weights, contrasts, whole, variance) == len(SPANS) - 1


# --------------------------------------------------------------------------------------------------
# From end to end
# --------------------------------------------------------------------------------------------------

NUMBERS = ["value", "standard_error", "alpha", "degrees_of_freedom", "variance_response", "n_used"]


@pytest.fixture(scope="module")
def log():
    scenario = qdq.Scenario(n_servers=4, control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2))
    return qdq.simulate(scenario, qdq.Bernoulli(0.5), 20_000, seed=4)


@pytest.mark.parametrize("rule", horizon.RULES)
@pytest.mark.parametrize("method", ["dq_response", "dq_queue", "dq_mixed"])
def test_a_rules_estimate_is_that_of_the_horizon_it_chose(log, method, rule):
    function = getattr(qdq, method)
    found = function(log, horizon=rule, variance="batch_means")
    assert found.rule == rule
    assert found.horizon in grid(20_000)
    same = function(log, horizon=found.horizon, variance="batch_means")
    assert same.rule is None
    for name in NUMBERS:
        assert getattr(found, name) == getattr(same, name)
    assert f"by the rule {rule!r}" in repr(found)
    assert "of the response beyond it" in repr(found)


@pytest.mark.parametrize("rule", horizon.RULES)
def test_a_rule_by_plain_numpy(log, rule):
    """All that the rule weighs, from the log's own windows."""
    n, spans = log.n_tasks, grid(20_000).tolist()
    found = np.arange(n) - np.searchsorted(np.sort(log.departure), log.arrival, side="right")
    found = found + np.sum(log.carried_over[:, 2][:, None] > log.arrival, axis=0)
    rate = (n - 1) / np.ptp(log.arrival)
    w, q = (np.concatenate(([0.0], np.cumsum(x))) for x in (log.response_time, found / rate))
    contrasts, within = [], []
    for span in spans:
        both = np.array([w[span:-1] - w[: -span - 1], q[span + 1 :] - q[1:-span]])
        arms = [log.treated[: n - span], ~log.treated[: n - span]]
        covariance = sum(np.cov(both[:, arm]) / arm.sum() for arm in arms)
        difference = both[:, arms[0]].mean(axis=1) - both[:, arms[1]].mean(axis=1)
        contrasts.append(
            inference.WindowContrast(
                *difference, covariance[0, 0], covariance[1, 1], covariance[0, 1]
            )
        )
        within.append(sum(both[:, arm].var(axis=1) * arm.sum() for arm in arms) / (n - span))
    within = np.array(within)
    remaining = np.column_stack(
        [Decay(np.array(spans), within[:, k], n - 1).remaining_at(spans) for k in (0, 1)]
    )
    for method in ("dq_response", "dq_queue", "dq_mixed"):
        weights = np.array(
            [{"dq_response": 1.0, "dq_queue": 0.0}.get(method, c.best_weight) for c in contrasts]
        )
        variance = np.array(
            [c.mixture_variance(a) for c, a in zip(contrasts, weights, strict=True)]
        )
        place = choose(rule, weights, contrasts, remaining, variance)
        assert getattr(qdq, method)(log, horizon=rule).horizon == spans[place]


def test_each_method_has_a_horizon_of_its_own(log):
    frame = qdq.estimate(log, horizon="rmse")
    assert frame["horizon"].isna().tolist() == [True, False, False, False]
    for method, span in zip(frame["method"][1:], frame["horizon"][1:], strict=True):
        assert getattr(qdq, method)(log, horizon="rmse").horizon == span


def test_a_scenario_bounds_the_grid(log):
    most = estimators.MOST_DEFAULTS * log.scenario.default_horizon
    spans = estimators.horizon_grid(10**7, log.scenario)
    assert max(spans) <= most < 2 * max(spans)
    assert estimators.horizon_grid(10**7, None) == tuple(grid(10**7))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.filterwarnings("ignore:.*windows side by side:UserWarning")
def test_coverage_is_the_default_where_nothing_else_is_known(log):
    bare = qdq.TaskLog(arrival=log.arrival, departure=log.departure, treated=log.treated)
    found = qdq.dq_mixed(bare)
    assert found.rule == "coverage"
    assert found.horizon == qdq.dq_mixed(bare, horizon="coverage").horizon


@pytest.mark.parametrize("wrong", ["RMSE", "best", ""])
def test_other_rules_are_refused(log, wrong):
    with pytest.raises(ValueError, match="or one of 'rmse', 'coverage'"):
        qdq.dq_mixed(log, horizon=wrong)
