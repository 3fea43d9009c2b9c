"""Simulated estimates against their exact expectations on small chains.

The tolerance is 4 standard errors of the mean over replications (false alarm 6e-5 a comparison),
and the standard error itself must be small enough to tell the expectation from the neighbouring
wrong ones: another horizon, the untruncated limit, the direct effect, the true effect.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

import qdq
from qdq.exact import small_chain

Z = 4.0
N_TASKS = 40_000
N_REPLICATIONS = 160

CELLS = {
    "two servers": (
        qdq.Scenario(
            n_servers=2,
            arrivals=qdq.Poisson(0.6),
            control=qdq.PowerOfD(1),
            treatment=qdq.PowerOfD(2),
        ),
        0.5,
        (10, 60),
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
        (5, 25),
    ),
    "three servers, p = 0.7": (
        qdq.Scenario(
            n_servers=3,
            arrivals=qdq.Poisson(0.5),
            control=qdq.PowerOfD(1),
            treatment=qdq.PowerOfD(3),
        ),
        0.7,
        (1, 20),
    ),
    "random against idle queues": (
        qdq.Scenario(
            n_servers=3,
            arrivals=qdq.Poisson(0.5),
            control=qdq.PowerOfD(1),
            treatment=qdq.JoinIdleQueue(),
        ),
        0.5,
        (12,),
    ),
}


@functools.cache
def chain_of(name):
    scenario, propensity, _ = CELLS[name]
    return small_chain(scenario, propensity)


def replicate(scenario, propensity, horizons, seed):
    """Return the estimates of all replications, by name."""
    values = {}
    methods = ("naive", "dq_response", "dq_queue")
    for j in range(N_REPLICATIONS):
        log = qdq.simulate(scenario, qdq.Bernoulli(propensity), N_TASKS, seed=(seed, j))
        for horizon in horizons:
            for normalise in ("group_means", "inverse_propensity"):
                frame = qdq.estimate(log, methods, horizon=horizon, normalise=normalise)
                for method, value in zip(frame["method"], frame["value"], strict=True):
                    key = method if method == "naive" else (method, horizon, normalise)
                    values.setdefault(key, {})[j] = value
    return {key: np.array(list(column.values())) for key, column in values.items()}


@pytest.mark.parametrize("name", CELLS)
def test_means_over_replications_agree_with_the_exact_expectation(name):
    scenario, propensity, horizons = CELLS[name]
    chain = chain_of(name)
    values = replicate(scenario, propensity, horizons, seed=sum(map(ord, name)))
    exact = {"naive": chain.direct_effect()}
    for horizon in horizons:
        for normalise in ("group_means", "inverse_propensity"):
            exact["dq_response", horizon, normalise] = chain.expected_dq_response(horizon)
            exact["dq_queue", horizon, normalise] = chain.expected_dq_queue(horizon)
    for key, expected in exact.items():
        error = values[key].std(ddof=1) / math.sqrt(N_REPLICATIONS)
        assert abs(values[key].mean() - expected) < Z * error, (
            key,
            values[key].mean(),
            expected,
            error,
        )
    # Sharp enough to see a sign, a factor of two, and the naive one's miss.
    naive_error = values["naive"].std(ddof=1) / math.sqrt(N_REPLICATIONS)
    assert Z * naive_error < 0.3 * abs(chain.direct_effect() - chain.global_effect)
    for key in (
        ("dq_response", max(horizons), "group_means"),
        ("dq_queue", max(horizons), "group_means"),
    ):
        error = values[key].std(ddof=1) / math.sqrt(N_REPLICATIONS)
        assert Z * error < 0.6 * abs(exact[key])


def test_an_off_by_one_window_would_be_seen():
    # At a short horizon the exact expectations of neighbouring windows differ by many standard
    # errors.
    scenario, propensity, _ = CELLS["two servers"]
    chain = chain_of("two servers")
    values = replicate(scenario, propensity, (2,), seed=77)
    for key, exact, wrong_horizons in (
        (("dq_response", 2, "group_means"), chain.expected_dq_response, (1,)),
        (("dq_queue", 2, "group_means"), chain.expected_dq_queue, (1, 3)),
    ):
        mean, sd = values[key].mean(), values[key].std(ddof=1)
        error = sd / math.sqrt(N_REPLICATIONS)
        assert abs(mean - exact(2)) < Z * error
        for wrong in wrong_horizons:
            assert abs(mean - exact(wrong)) > 2 * Z * error


@pytest.mark.parametrize("name", CELLS)
def test_pure_runs_agree_with_the_exact_effect(name):
    scenario, _, _ = CELLS[name]
    chain = chain_of(name)
    pairs = np.array(
        [
            [
                qdq.simulate(scenario, design, 30_000, seed=(31, j)).response_time.mean()
                for design in (qdq.AllControl(), qdq.AllTreatment())
            ]
            for j in range(60)
        ]
    )
    for arm, p in ((0, 0.0), (1, 1.0)):
        error = pairs[:, arm].std(ddof=1) / math.sqrt(60)
        assert abs(pairs[:, arm].mean() - chain.mean_response(p)) < Z * error
    effect = pairs[:, 1] - pairs[:, 0]
    error = effect.std(ddof=1) / math.sqrt(60)
    assert error < 0.02 * chain.mean_response(0.0)
    assert abs(effect.mean() - chain.global_effect) < Z * error


def test_dq_methods_see_what_the_naive_one_misses():
    # The mutation check of the whole: the naive estimator must fail where DQ passes.
    scenario, propensity, horizons = CELLS["two servers"]
    chain = chain_of("two servers")
    values = replicate(scenario, propensity, (max(horizons),), seed=5)
    naive = values["naive"]
    assert abs(naive.mean() - chain.slope()) > 10 * naive.std(ddof=1) / math.sqrt(N_REPLICATIONS)
    response = values["dq_response", max(horizons), "group_means"]
    assert abs(response.mean() - chain.slope()) < 0.2 * abs(chain.slope())
