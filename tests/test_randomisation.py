"""The randomisation test, against all assignments of small logs and under the sharp null."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import qdq
from qdq import randomisation as module
from qdq import randomisation_test

# The logs here are short, and are said to be so.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{doubt}:UserWarning")
    for doubt in ("windows side by side", "degrees of freedom", "is rough", "heavy tail")
]

DQ = ("dq_response", "dq_queue", "dq_mixed")
METHODS = ("naive", *DQ)


def random_log(n=10, seed=1, propensity=0.5, **fields):
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(size=n))
    treated = rng.permutation(np.arange(n) % 2 == 0)
    return qdq.TaskLog(
        arrival=arrival,
        departure=arrival + rng.exponential(3.0, n),
        treated=treated,
        propensity=propensity,
        **fields,
    )


def units_of(log, method):
    """Return what is labelled, and compared: the tasks' responses, or both sums of the windows."""
    response = log.departure - log.arrival
    if method == "naive":
        return response[:, None]
    n = log.n_tasks
    found = [np.sum(log.departure[:k] > log.arrival[k]) for k in range(n)]
    rate = (n - 1) / np.ptp(log.arrival)
    return np.array(
        [(sum(response[i : i + 2]), sum(found[i + 1 : i + 3]) / rate) for i in range(n - 2)]
    )


def estimate_of(units, method, treated):
    """Return the estimate if the units had been labelled so, with all else as it was."""
    z = np.array(treated)
    difference = units[z].mean(axis=0) - units[~z].mean(axis=0)
    if method in ("naive", "dq_response"):
        return difference[0]
    if method == "dq_queue":
        return difference[1]
    (v, c), (_, w) = sum(np.cov(units[arm].T) / arm.sum() for arm in (z, ~z))
    alpha = (w - c) / (v + w - 2.0 * c)
    return alpha * difference[0] + (1.0 - alpha) * difference[1]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_shuffled_labels_against_all_of_them(method, seed):
    """Without a known propensity; the labels of the windows are shuffled among the windows."""
    log = random_log(10, seed=seed, propensity=None)
    units = units_of(log, method)
    mine = log.treated[: len(units)]
    own = estimate_of(units, method, mine)
    labellings = [
        np.isin(np.arange(len(units)), chosen)
        for chosen in itertools.combinations(range(len(units)), int(mine.sum()))
    ]
    values = np.array([estimate_of(units, method, z) for z in labellings])
    exact = np.mean(np.abs(values) >= abs(own) * (1.0 - 1e-9))
    draws = 2_000
    found = randomisation_test(log, method, horizon=2, draws=draws, seed=3)
    assert found.value == pytest.approx(own, rel=1e-9)
    error = np.sqrt(exact * (1.0 - exact) / draws)
    assert abs(found.p_value - exact) < 4.5 * error + 1.0 / draws
    assert (found.method, found.draws) == (method, draws)


@pytest.mark.parametrize("propensity", [0.5, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_drawn_labels_against_all_of_them(method, propensity):
    """With the known propensity; an assignment with one of an arm counts as the log's own."""
    log = random_log(9, seed=4, propensity=propensity)
    units = units_of(log, method)
    count = len(units)
    own = abs(estimate_of(units, method, log.treated[:count]))
    exact = certain = 0.0
    for z in itertools.product([False, True], repeat=count):
        weight = propensity ** sum(z) * (1.0 - propensity) ** (count - sum(z))
        if min(sum(z), count - sum(z)) < 2:
            certain += weight
        elif abs(estimate_of(units, method, z)) >= own * (1.0 - 1e-9):
            exact += weight
    assert exact > 0.02
    assert certain > 0.02
    draws = 2_000
    found = randomisation_test(log, method, horizon=2, draws=draws, seed=5)
    error = np.sqrt((exact + certain) * (1.0 - exact - certain) / draws)
    assert abs(found.p_value - exact - certain) < 4.5 * error + 1.0 / draws


def test_a_switchback_against_all_assignments_of_its_periods():
    log = random_log(120, seed=6, propensity=None, period=np.repeat(np.arange(12), 10))
    rng = np.random.default_rng(6)
    coins = rng.permutation(np.arange(12) % 2 == 0)
    log = replace(log, treated=coins[log.period])
    own = coins[:-1]  # the last period is never whole
    # Periods are of one size, so their means are weighted alike.
    means = (log.departure - log.arrival).reshape(12, 10).mean(axis=1)[:-1]
    values = []
    for chosen in itertools.combinations(range(11), int(own.sum())):
        z = np.isin(np.arange(11), chosen)
        values.append(means[z].mean() - means[~z].mean())
    value = means[own].mean() - means[~own].mean()
    exact = np.mean(np.abs(values) >= abs(value) * (1.0 - 1e-9))
    draws = 2_000
    found = randomisation_test(log, "switchback", draws=draws, seed=7)
    assert found.value == pytest.approx(value, rel=1e-9)
    error = np.sqrt(exact * (1.0 - exact) / draws)
    assert 0.02 < exact < 0.98
    assert abs(found.p_value - exact) < 4.5 * error + 1.0 / draws
    # A washout drops the beginning of every period.
    washed = randomisation_test(log, "switchback", washout=3.0, draws=99)
    assert washed.value == qdq.switchback(log, washout=3.0).value


@pytest.mark.parametrize("method", ["naive", "dq_mixed"])
def test_p_values_are_uniform_under_the_sharp_null(method):
    """Labels that do nothing: whatever the responses, all ranks are equally likely."""
    log = random_log(60, seed=8)
    rng = np.random.default_rng(9)
    draws, runs = 19, 120
    ranks = np.zeros(draws + 1)
    for run in range(runs):
        treated = rng.random(60) < 0.5
        found = randomisation_test(
            replace(log, treated=treated), method, horizon=3, draws=draws, seed=run
        )
        ranks[round(found.p_value * (draws + 1)) - 1] += 1
    # Chi-square of 20 cells; false alarm 1e-5.
    assert stats.chisquare(ranks).pvalue > 1e-5


def test_an_effect_is_found():
    log = random_log(400, seed=10)
    slower = replace(log, departure=log.departure + 2.0 * log.treated)
    found = randomisation_test(slower, "naive", draws=999)
    assert found.p_value == 0.001
    assert randomisation_test(log, "naive", draws=99).p_value > 0.01
    assert randomisation_test(slower, "dq_response", horizon=1, draws=99).p_value == 0.01


@pytest.mark.parametrize("queue", ["in_system", "including_self", "waiting", "time_average"])
@pytest.mark.parametrize("rate", [None, "window", "scenario", lambda t: 3.0 + np.sin(t)])
def test_values_are_the_estimates(queue, rate):
    scenario = qdq.Scenario(n_servers=4, arrivals=qdq.Periodic(0.6, 0.5, 30.0))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), 2_000, seed=2, record=("service_time",))
    call = module.Call(("dq_mixed",), 25, "group_means", queue, rate)
    treated, columns = module._units(log, call)
    values = {"horizon": 25, "queue": queue, "arrival_rate": rate}
    for method in DQ:
        options = {"horizon": 25} if method == "dq_response" else values
        expected = getattr(qdq, method)(log, **options).value
        (found,) = module._estimates(method, treated[None], columns)
        assert found == pytest.approx(expected, rel=1e-9)


def test_the_default_horizon_is_that_of_the_estimate():
    log = qdq.simulate(qdq.Scenario(n_servers=4), qdq.Bernoulli(0.5), 3_000, seed=3)
    assert randomisation_test(log, draws=19).value == qdq.dq_mixed(log).value


def test_draws_depend_on_the_seed_alone(monkeypatch):
    log = random_log(50, seed=11)
    found = randomisation_test(log, "naive", draws=499, seed=4)
    assert randomisation_test(log, "naive", draws=499, seed=4) == found
    assert randomisation_test(log, "naive", draws=499, seed=5) != found
    # However many are drawn at a time.
    monkeypatch.setattr(module, "_DRAWS_AT_ONCE", 60)
    assert randomisation_test(log, "naive", draws=499, seed=4) == found


def test_a_skipped_stretch_counts_for_nothing():
    log = random_log(200, seed=12)
    skipped = replace(log, skip=log.arrival[40] - log.arrival[0])
    changed = log.departure.copy()
    changed[:40] += 1e-3 * np.arange(40)
    found = randomisation_test(skipped, "naive", draws=99)
    assert found == randomisation_test(replace(skipped, departure=changed), "naive", draws=99)
    call = module.Call(("dq_response",), 5)
    treated, columns = module._units(skipped, call)
    assert treated.size == len(columns) == 200 - 40 - 5


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"method": "server_split"}, ValueError, "method='server_split' is not allowed"),
        ({"method": None}, ValueError, "method=None is not allowed: method must be one of 'naive'"),
        ({"draws": 18}, ValueError, "draws=18 is not allowed: draws must be a number of assign"),
        ({"draws": 99.5}, ValueError, "draws=99.5 is not allowed"),
        ({"seed": -1}, ValueError, "seed=-1 is not allowed: seed must be an integer >= 0"),
        ({"horizon": 0}, ValueError, "horizon=0 is not allowed"),
        ({"horizon": 60}, ValueError, "horizon=60 is not allowed"),
        ({"queue": "all"}, ValueError, "queue='all' is not allowed"),
        ({"arrival_rate": 0.0}, ValueError, "arrival_rate=0.0 is not allowed"),
        ({"washout": -1.0}, ValueError, "washout=-1.0 is not allowed"),
        ({"method": "switchback"}, ValueError, "switchback needs a log of design Switchback"),
        ({"log": None}, TypeError, "log is a NoneType: it must be a TaskLog"),
    ],
)
def test_refusals(options, kind, message):
    options = {"log": random_log(60), "horizon": 5} | options
    with pytest.raises(kind, match=message):
        randomisation_test(options.pop("log"), **options)


def test_a_split_of_servers_is_refused():
    log = qdq.simulate(qdq.Scenario(n_servers=8), qdq.ServerSplit(), 500, seed=1)
    with pytest.raises(ValueError, match="naive needs a log of design Bernoulli"):
        randomisation_test(log, "naive")
