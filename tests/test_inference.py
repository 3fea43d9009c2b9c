"""Standard errors and intervals, against scipy, the formulas written out, and the raw scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from qdq import inference


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("freedom", [1, 2.7, 29, 1e6, math.inf])
def test_interval_is_that_of_scipy(level, freedom):
    low, high = inference.confidence_interval(3.0, 0.5, freedom, level)
    law = stats.norm() if math.isinf(freedom) else stats.t(freedom)
    assert (low, high) == pytest.approx([3.0 + 0.5 * x for x in law.interval(level)], rel=1e-9)


@pytest.mark.parametrize(
    ("first", "stop", "batches"),
    [(0, 2, 2), (5, 24, 2), (0, 39, 3), (7, 306, 29), (7, 307, 30), (0, 10**8, 30)],
)
def test_batches_are_equal_runs_that_use_every_task(first, stop, batches):
    edges = inference.batch_edges(first, stop)
    assert edges[0] == first
    assert edges[-1] == stop
    assert len(edges) == batches + 1
    assert np.ptp(np.diff(edges)) <= 1


def test_batch_means_by_hand():
    # Two runs; control 1, 3 | 5, of mean 3; treated 7 | 2, 3, of mean 4.
    counts = np.array([[2, 1], [1, 2]])
    sums = np.array([[4.0, 7.0], [5.0, 5.0]])
    contrast = inference.batch_means(counts, sums)
    u = [(7 - 4) / 3 - (4 - 6) / 3, (5 - 8) / 3 - (5 - 3) / 3]
    assert contrast.value == 1.0
    assert contrast.variance == pytest.approx(2 / 1 * (u[0] ** 2 + u[1] ** 2), rel=1e-14)
    assert contrast.degrees_of_freedom == 1


def test_batch_means_of_independent_tasks_give_the_usual_standard_error():
    rng = np.random.default_rng(1)
    n = 30_000
    treated = rng.random(n) < 0.3
    response = rng.exponential(size=n)
    edges = inference.batch_edges(0, n)
    arms = np.stack([~treated, treated], axis=1)
    counts = np.add.reduceat(arms.astype(int), edges[:-1])
    sums = np.add.reduceat(arms * response[:, None], edges[:-1])
    usual = sum(np.var(response[arm]) / arm.sum() for arm in arms.T)
    ratio = inference.batch_means(counts, sums).variance / usual
    # The ratio is chi-square with 29 degrees of freedom over 29; these are its 1e-5 quantiles.
    assert 0.25 < ratio < 2.7


def of_clusters(counts, sums, origin=0.0):
    """Return the moments that `clustered` takes, with `origin` taken off each response."""
    sums = sums - origin * counts
    columns = (counts > 0, counts, sums, counts**2, sums**2, counts * sums)
    return np.stack([column.sum(axis=0) for column in columns], axis=1).astype(float)


def test_clustered_variance_by_hand():
    # Clusters of 1, 2 control tasks and 2, 1, 3 treated ones.
    counts = np.array([[1, 0], [0, 2], [2, 0], [0, 1], [0, 3]])
    sums = np.array([[2.0, 0], [0, 6.0], [7.0, 0], [0, 1.0], [0, 11.0]])
    contrast = inference.clustered(of_clusters(counts, sums))
    m0, m1 = 9 / 3, 18 / 6
    v0 = 2 / 1 * (((2 - 1 * m0) / 3) ** 2 + ((7 - 2 * m0) / 3) ** 2)
    v1 = 3 / 2 * (((6 - 2 * m1) / 6) ** 2 + ((1 - m1) / 6) ** 2 + ((11 - 3 * m1) / 6) ** 2)
    assert contrast.value == m1 - m0
    assert contrast.variance == pytest.approx(v0 + v1, rel=1e-14)
    shifted = inference.clustered(of_clusters(counts, sums, 2.5))
    assert shifted == pytest.approx(contrast, rel=1e-13)
    assert contrast.degrees_of_freedom == pytest.approx((v0 + v1) ** 2 / (v0**2 / 1 + v1**2 / 2))


def test_clusters_of_equal_size_give_welchs_test():
    rng = np.random.default_rng(2)
    means = rng.normal(size=15)
    treated = np.arange(15) % 3 == 0
    counts = 7 * np.stack([~treated, treated], axis=1)
    contrast = inference.clustered(of_clusters(counts, counts * means[:, None]))
    welch = stats.ttest_ind(means[treated], means[~treated], equal_var=False)
    assert contrast.value / math.sqrt(contrast.variance) == pytest.approx(welch.statistic)
    assert contrast.degrees_of_freedom == pytest.approx(welch.df)


@pytest.mark.parametrize("origin", [0.0, 1.0, 2.7])
def test_clusters_without_spread_have_variance_zero(origin):
    counts = np.array([[1, 0], [0, 1], [1, 0], [0, 1]])
    contrast = inference.clustered(of_clusters(counts, counts * np.array([1.0, 4.0]), origin))
    assert contrast == (3.0, 0.0, 2.0)


def moments_of(x, y, treated):
    """Return what `Sums.window_moments` says of the sums x and y."""
    rows = []
    for arm in (~treated, treated):
        dx, dy = x[arm] - x[arm].mean(), y[arm] - y[arm].mean()
        rows.append([arm.sum(), x[arm].mean(), y[arm].mean(), dx @ dx, dy @ dy, dx @ dy])
    return np.array(rows)


@pytest.fixture
def sums():
    rng = np.random.default_rng(3)
    x = 100 + rng.normal(size=200)
    return x, 90 + 0.7 * x + rng.normal(size=200), rng.random(200) < 0.3


def test_group_means_of_raw_sums(sums):
    x, y, treated = sums
    found = inference.difference_in_sums(moments_of(x, y, treated))
    within = [np.cov(x[arm], y[arm]) / arm.sum() for arm in (treated, ~treated)]
    total = within[0] + within[1]
    expected = [
        x[treated].mean() - x[~treated].mean(),
        y[treated].mean() - y[~treated].mean(),
        total[0, 0],
        total[1, 1],
        total[0, 1],
    ]
    assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9])
def test_inverse_propensity_of_raw_scores(sums, p):
    x, y, treated = sums
    found = inference.difference_in_sums(moments_of(x, y, treated), p)
    weight = treated / p - ~treated / (1 - p)
    covariance = np.cov(weight * x, weight * y) / len(x)
    expected = [
        np.mean(weight * x),
        np.mean(weight * y),
        covariance[0, 0],
        covariance[1, 1],
        covariance[0, 1],
    ]
    assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    ("v", "w", "c"), [(1.0, 4.0, 0.5), (1.0, 4.0, 1.9), (3.0, 1.0, -1.0), (2.0, 2.0, 1.999)]
)
def test_best_weight_gives_the_smallest_variance(v, w, c):
    alpha = inference.best_weight(v, w, c)
    best = inference.mixture_variance(alpha, v, w, c)
    for other in np.linspace(alpha - 3.0, alpha + 3.0, 61):
        assert best <= inference.mixture_variance(other, v, w, c) + 1e-14
    # The minimum of the parabola: the determinant over the variance of the difference.
    assert best == pytest.approx((v * w - c**2) / (v + w - 2 * c))


def test_mixture_variance_is_that_of_the_mixed_sums(sums):
    x, y, treated = sums
    for alpha in (-1.0, 0.0, 0.3, 1.0, 2.0):
        mixed = alpha * x + (1 - alpha) * y
        expected = inference.difference_in_sums(moments_of(mixed, mixed, treated)).variance_response
        parts = inference.difference_in_sums(moments_of(x, y, treated))[2:]
        assert inference.mixture_variance(alpha, *parts) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("v", "w", "c"), [(0.0, 0.0, 0.0), (2.0, 2.0, 2.0), (3.0, 3.0, 3.0 - 1e-15)]
)
def test_weight_is_one_half_where_no_weight_is_better(v, w, c):
    assert inference.best_weight(v, w, c) == 0.5
