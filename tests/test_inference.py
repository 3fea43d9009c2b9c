"""Standard errors and intervals, against scipy, formulas written out, raw scores and known laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import lfilter

from qdq import inference


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("freedom", [1, 2.7, 29, 1e6, math.inf])
def test_interval_is_that_of_scipy(level, freedom):
    low, high = inference.confidence_interval(3.0, 0.5, freedom, level)
    law = stats.norm() if math.isinf(freedom) else stats.t(freedom)
    assert (low, high) == pytest.approx([3.0 + 0.5 * x for x in law.interval(level)], rel=1e-9)


# --------------------------------------------------------------------------------------------------
# Influences of blocks
# --------------------------------------------------------------------------------------------------


def random_blocks(rng, blocks=40, variables=1, arms_always=True):
    """Return counts (B, 2) and sums (B, 2, m) of blocks that differ in size."""
    counts = rng.integers(int(arms_always), 9, (blocks, 2)).astype(float)
    return counts, counts[:, :, None] * rng.gamma(2.0, 1.0, (blocks, 2, variables))


def difference(counts, sums, propensity):
    """Return the difference treated minus control, written out."""
    n0, n1 = counts.sum(axis=0)
    s0, s1 = sums.sum(axis=0)
    if propensity is None:
        return s1 / n1 - s0 / n0
    return (s1 / propensity - s0 / (1.0 - propensity)) / (n0 + n1)


@pytest.mark.parametrize("propensity", [None, 0.3])
def test_influence_is_the_derivative_by_the_weight_of_a_block(propensity):
    counts, sums = random_blocks(np.random.default_rng(21), variables=2)
    influence = inference.influence(counts, sums, propensity)
    np.testing.assert_allclose(influence.sum(axis=0), 0.0, atol=1e-15 * np.abs(sums).sum())
    step = 1e-5
    for b in range(len(counts)):
        ends = []
        for weight in (1.0 + step, 1.0 - step):
            weights = np.ones(len(counts))
            weights[b] = weight
            weighted = counts * weights[:, None], sums * weights[:, None, None]
            ends.append(difference(*weighted, propensity))
        # Central differences are off by a third derivative times step**2.
        np.testing.assert_allclose(
            influence[b], (ends[0] - ends[1]) / (2.0 * step), rtol=1e-7, atol=1e-10
        )


def test_influence_by_hand():
    # Two runs; control 1, 3 | 5, of mean 3; treated 7 | 2, 3, of mean 4.
    counts = np.array([[2.0, 1.0], [1.0, 2.0]])
    sums = np.array([[4.0, 7.0], [5.0, 5.0]])[:, :, None]
    influence = inference.influence(counts, sums)
    expected = [(7 - 4) / 3 - (4 - 6) / 3, (5 - 8) / 3 - (5 - 3) / 3]
    assert influence[:, 0] == pytest.approx(expected, rel=1e-14)
    # By scores 2 Z Y - 2 (1 - Z) Y: 2 (7 - 4) = 6 over three tasks, 0 over three; mean 1.
    influence = inference.influence(counts, sums, 0.5)
    assert influence[:, 0] == pytest.approx([(6 - 3) / 6, (0 - 3) / 6], rel=1e-14)


@settings(max_examples=100, deadline=None)
@given(blocks=st.integers(1, 300))
def test_merged_blocks_are_runs_of_equal_length(blocks):
    values = np.arange(2.0 * blocks).reshape(blocks, 2)
    found = inference.merged(values)
    by = -(-blocks // inference.BATCHES)
    expected = [values[k : k + by].sum(axis=0) for k in range(0, blocks, by)]
    np.testing.assert_array_equal(found, expected)
    assert len(found) <= inference.BATCHES


# --------------------------------------------------------------------------------------------------
# Variances of a sum of influences
# --------------------------------------------------------------------------------------------------


def test_batch_means_by_hand():
    found = inference.batch_means(np.array([3.0, 3.0]), np.array([0.5, -0.5]))
    assert found == (0.5 / (1.0 - 0.5), 1.0)
    found = inference.batch_means(np.array([1.0, 3.0, 4.0]), np.array([1.0, 2.0, -3.0]))
    assert found == (14.0 / (1.0 - 26.0 / 64.0), 2.0)


def test_batch_means_of_equal_batches_are_the_usual_ones():
    x = np.random.default_rng(22).normal(size=30)
    found = inference.batch_means(np.full(30, 7.0), (x - x.mean()) / 30)
    assert found.variance == pytest.approx(x.var(ddof=1) / 30, rel=1e-12)


def test_batch_means_are_unbiased_for_independent_units():
    """With units of variance 1 the mean has the variance 1/n, whatever the sizes of batches."""
    rng = np.random.default_rng(23)
    units = rng.integers(1, 30, 20).astype(float)
    n = units.sum()
    sums = rng.standard_normal((4000, 20)) * np.sqrt(units)
    influence = (sums - units * sums.sum(axis=1, keepdims=True) / n) / n
    found = np.array([inference.batch_means(units, row).variance for row in influence])
    # Four and a half standard errors.
    assert abs(found.mean() * n - 1.0) < 4.5 * found.std() * n / math.sqrt(4000)
    assert found.std() * n / math.sqrt(4000) < 0.01


def flat_terms_by_loops(squares):
    """Return the number of terms of `flat_terms`, written out."""
    m = len(squares)

    def loss(spectrum):
        """Minus the log likelihood of exponential variables, at its best level."""
        level = math.fsum(x / s for x, s in zip(squares, spectrum, strict=True)) / m
        return m * math.log(level) + math.fsum(map(math.log, spectrum))

    most = min(32, m)
    best, chosen = math.inf, None
    for ratio in inference.MEMORY_RATIOS:
        for knee in inference.MEMORY_KNEES:
            spectrum = [1.0 + ratio / (1.0 + (j / knee) ** 2) for j in range(1, m + 1)]
            if loss(spectrum) < best:
                best, chosen = loss(spectrum), [s / (1.0 + ratio) for s in spectrum]
    # Akaike: two parameters more must gain twice as much of twice the log likelihood.
    if 2.0 * (loss([1.0] * m) - best) < 4.0:
        return most
    flat = sum(np.mean(chosen[:k]) >= 0.95 for k in range(1, m + 1))
    return max(min(flat, most), min(4, most))


def series_by_loops(units, influence):
    """Return the variance of `series`, written out, and its number of terms."""
    blocks = len(units)
    total = sum(units)
    places = [(sum(units[:b]) + units[b] / 2.0) / total for b in range(blocks)]
    squares = []
    for j in range(1, blocks // 2 + 1):
        parts = [math.cos(math.pi * j * t) * u for t, u in zip(places, influence, strict=True)]
        squares.append(2.0 * math.fsum(parts) ** 2)
    clean = len(squares)
    for j in range(9, len(squares) + 1):
        half = j // 2
        level = float(stats.f.isf(1e-3 / (len(squares) - 8), 1, half))
        if squares[j - 1] > level * sum(squares[:half]) / half:
            clean = max(j // 3, 4)
            break
    terms = min(flat_terms_by_loops(squares[:clean]), clean)
    return sum(squares[:terms]) / terms, terms


def autoregressive(rng, rho, shape):
    """Return AR(1) series of variance 1 along the last axis, from their stationary law."""
    noise = rng.standard_normal(shape)
    noise[..., 1:] *= math.sqrt(1.0 - rho**2)
    return lfilter([1.0], [1.0, -rho], noise, axis=-1)


@pytest.mark.parametrize("rho", [0.0, -0.5, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("blocks", [8, 13, 40, 129, 256])
def test_series_is_its_formula(blocks, rho):
    rng = np.random.default_rng(24)
    units = np.full(blocks, 8.0)
    units[-1] = 3.0
    influence = autoregressive(rng, rho, blocks)
    influence -= influence.mean()
    found = inference.series(units, influence)
    variance, terms = series_by_loops(units.tolist(), influence.tolist())
    assert found.variance == pytest.approx(variance, rel=1e-10)
    assert found.degrees_of_freedom == terms


def test_series_of_few_blocks_is_that_of_batch_means():
    units, influence = np.arange(1.0, 8.0), np.array([3.0, -1, 2, -2, 1, -4, 1])
    assert inference.series(units, influence) == inference.batch_means(units, influence)


def means_and_series(x):
    """Return, of each row, the variance of its mean and the degrees of freedom by `series`."""
    n = x.shape[1]
    influence = (x - x.mean(axis=1, keepdims=True)) / n
    found = [inference.series(np.ones(n), row) for row in influence]
    return np.array(found).T


def test_series_of_white_noise():
    """Each term has the expectation 1/n; fewer are taken where slow ones happen to be large."""
    draws, n = 2000, 128
    waves = np.cos(math.pi * np.outer(np.arange(1, 65), (np.arange(n) + 0.5) / n))
    np.testing.assert_allclose(2.0 * waves @ waves.T / n, np.eye(64), atol=1e-12)
    noise = np.random.default_rng(25).standard_normal((draws, n))
    variance, freedom = means_and_series(noise)
    all_terms = np.mean(2.0 * (noise @ waves[:32].T / n) ** 2, axis=1)
    np.testing.assert_allclose(variance[freedom == 32.0], all_terms[freedom == 32.0], rtol=1e-9)
    assert np.mean(freedom == 32.0) > 0.7
    error = all_terms.std() * n / math.sqrt(draws)
    assert error < 0.01
    assert abs(all_terms.mean() * n - 1.0) < 4.5 * error
    # The choice of the terms makes it larger, by some 8 %.
    error = variance.std() * n / math.sqrt(draws)
    assert 1.0 - 4.5 * error < variance.mean() * n < 1.1 + 4.5 * error


@pytest.mark.parametrize(("rho", "lowest"), [(0.5, 0.93), (0.9, 0.88)])
def test_series_of_an_autoregression_is_its_long_run_variance(rho, lowest):
    """Near ``(1 + rho) / (1 - rho) / n``, where batch means of single blocks are far off."""
    draws, n = 1000, 256
    x = autoregressive(np.random.default_rng(26), rho, (draws, n))
    variance, freedom = means_and_series(x)
    lag = np.arange(1, n)
    exact = (1.0 + 2.0 * np.sum((1.0 - lag / n) * rho**lag)) / n
    ratio, error = variance.mean() / exact, variance.std() / exact / math.sqrt(draws)
    assert error < 0.025
    assert lowest - 4.5 * error < ratio < 1.03 + 4.5 * error
    assert freedom.mean() < 32.0
    independent = x.var(axis=1).mean() / n
    assert independent < 0.4 * exact


@pytest.mark.parametrize(
    ("cycles", "size", "phase"), [(5, 5.0, 0.0), (8, 5.0, 0.0), (20, 5.0, 0.0), (20, 1.5, 1.6)]
)
def test_a_cycle_is_no_noise(cycles, size, phase):
    """A sinusoid that stands out leaves the variance what it was, but for what leaks."""
    draws, n = 300, 256
    noise = np.random.default_rng(27).standard_normal((draws, n))
    time = (np.arange(n) + 0.5) / n
    wave = size * np.cos(2.0 * math.pi * cycles * time + phase)
    variance, freedom = means_and_series(noise + wave)
    assert (freedom <= max(2 * cycles // 3, 4)).all()
    terms = np.cos(math.pi * np.outer(np.arange(1, freedom.max() + 1), time))
    leak = np.mean(2.0 * (terms @ wave / n) ** 2) * n
    assert leak < 0.2
    ratio, error = variance.mean() * n, variance.std() * n / math.sqrt(draws)
    assert error < 0.05
    assert abs(ratio - 1.0 - leak) < 4.5 * error + 0.01
    # Taken for noise, it would add to the variance.
    batches = [inference.batch_means(np.ones(n), (x - x.mean()) / n) for x in noise + wave]
    assert np.mean([batch.variance for batch in batches]) * n > 1.0 + 0.45 * size**2


def block_sums(rng, blocks=12):
    """Return sums of tasks, response and its square by block and arm, and the tasks."""
    rows = []
    for b in range(blocks):
        for arm in (0, 1):
            for _ in range(rng.integers(1, 6)):
                rows.append((b, arm, rng.exponential()))
    b, arm, x = map(np.array, zip(*rows, strict=True))
    sums = np.zeros((blocks, 2, 2))
    np.add.at(sums, (b, arm), np.column_stack((np.ones(x.size), x)))
    return sums, b, arm, x


def contrast_of(sums):
    return float(sums[1, 1] / sums[1, 0] - sums[0, 1] / sums[0, 0])


def test_jackknife_by_leaving_out_tasks():
    sums, b, arm, x = block_sums(np.random.default_rng(28))
    found = inference.jackknife(sums, contrast_of)
    whole = x[arm == 1].mean() - x[arm == 0].mean()
    pseudo, h = [], []
    for k in range(12):
        kept = b != k
        without = x[kept & (arm == 1)].mean() - x[kept & (arm == 0)].mean()
        h.append(x.size / np.sum(~kept))
        pseudo.append(h[-1] * whole - (h[-1] - 1.0) * without)
    mean = sum(v / k for v, k in zip(pseudo, h, strict=True))  # weighted by units
    variance = np.mean([(v - mean) ** 2 / (k - 1.0) for v, k in zip(pseudo, h, strict=True)])
    assert found.variance == pytest.approx(variance, rel=1e-12)
    assert found.degrees_of_freedom == 11


def test_jackknife_of_a_mean_of_equal_blocks_is_that_of_batch_means():
    rng = np.random.default_rng(29)
    # One arm: the estimate is a plain mean, of which the jackknife is exact.
    sums = np.zeros((30, 2, 2))
    sums[:, 1, 0] = 5.0
    sums[:, 1, 1] = rng.exponential(size=30)
    found = inference.jackknife(sums, lambda total: float(total[1, 1] / total[1, 0]))
    x = sums[:, 1, 1] / 5.0
    assert found.variance == pytest.approx(x.var(ddof=1) / 30, rel=1e-10)
    # With both arms it is the same to first order: closer with more blocks.
    apart = []
    for blocks in (30, 480):
        counts = rng.integers(1, 9, blocks)[:, None] * [1.0, -1.0] + [0.0, 10.0]
        totals = counts[:, :, None] * rng.gamma(2.0, 1.0, (blocks, 2, 1))
        sums = np.concatenate((counts[:, :, None], totals), axis=2)
        influence = inference.influence(counts, totals)[:, 0]
        plain = inference.batch_means(counts.sum(axis=1), influence)
        apart.append(abs(inference.jackknife(sums, contrast_of).variance / plain.variance - 1.0))
    assert apart[0] < 0.2
    assert apart[1] < 0.02


def test_spread_goes_by_its_name():
    counts, totals = random_blocks(np.random.default_rng(30), 100)
    blocks = np.concatenate((counts[:, :, None], totals), axis=2)

    def influence(blocks):
        return inference.influence(blocks[:, :, 0], blocks[:, :, 1:])[:, 0]

    score = inference.Spread(7.0, math.inf)
    found = {
        by: inference.spread(by, score, blocks, influence, contrast_of)
        for by in ("score", "hac", "batch_means", "jackknife")
    }
    few = np.stack([blocks[k : k + 4].sum(axis=0) for k in range(0, 100, 4)])  # at most 32
    units = few[:, :, 0].sum(axis=1)
    expected = {
        "score": score,
        "hac": inference.series(counts.sum(axis=1), influence(blocks)),
        "batch_means": inference.batch_means(units, influence(few)),
        "jackknife": inference.jackknife(few, contrast_of),
    }
    for by, spread in expected.items():
        assert found[by] == pytest.approx(spread, rel=1e-12)
    assert len(set(found.values())) == 4
    # Leaving out the only block with treated units would leave nothing to compare.
    blocks[1:, 1] = 0.0
    assert inference.spread("jackknife", score, blocks, influence, contrast_of) == score


def test_difference_of_means_of_independent_tasks_is_welchs():
    rng = np.random.default_rng(31)
    arms = [1e6 + rng.exponential(size=n) for n in (50, 20)]
    origin = arms[1][0]
    sums = np.array([[x.size, (x - origin).sum(), ((x - origin) ** 2).sum()] for x in arms])
    found = inference.difference_of_means(sums)
    welch = stats.ttest_ind(arms[1], arms[0], equal_var=False)
    assert found.value == pytest.approx(arms[1].mean() - arms[0].mean(), rel=1e-9)
    assert found.value / math.sqrt(found.variance) == pytest.approx(welch.statistic, rel=1e-8)
    assert math.isinf(found.degrees_of_freedom)


# --------------------------------------------------------------------------------------------------
# Clusters
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# Differences in truncated sums
# --------------------------------------------------------------------------------------------------

ORIGIN = np.array([99.0, 150.0])


def moments_of(x, y, treated):
    """Return what `Sums.windows` says of the sums x and y, the arms' rows."""
    x, y = x - ORIGIN[0], y - ORIGIN[1]
    columns = np.stack([np.ones(x.size), x, y, x * x, y * y, x * y], axis=1)
    return np.stack([columns[~treated].sum(axis=0), columns[treated].sum(axis=0)])


@pytest.fixture
def sums():
    rng = np.random.default_rng(3)
    x = 100 + rng.normal(size=200)
    return x, 90 + 0.7 * x + rng.normal(size=200), rng.random(200) < 0.3


def test_group_means_of_raw_sums(sums):
    x, y, treated = sums
    found = inference.difference_in_sums(moments_of(x, y, treated), ORIGIN)
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
    found = inference.difference_in_sums(moments_of(x, y, treated), ORIGIN, p)
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


def test_variances_within_the_arms(sums):
    x, y, treated = sums
    within = [
        sum(np.sum((v[arm] - v[arm].mean()) ** 2) for arm in (treated, ~treated)) for v in (x, y)
    ]
    found = inference.within(moments_of(x, y, treated))
    np.testing.assert_allclose(found, np.array(within) / x.size, rtol=1e-11)


@pytest.mark.parametrize(
    ("v", "w", "c"), [(1.0, 4.0, 0.5), (1.0, 4.0, 1.9), (3.0, 1.0, -1.0), (2.0, 2.0, 1.999)]
)
def test_best_weight_gives_the_smallest_variance(v, w, c):
    contrast = inference.WindowContrast(5.0, 7.0, v, w, c)
    alpha = contrast.best_weight
    best = contrast.mixture_variance(alpha)
    for other in np.linspace(alpha - 3.0, alpha + 3.0, 61):
        assert best <= contrast.mixture_variance(other) + 1e-14
    # The minimum of the parabola: the determinant over the variance of the difference.
    assert best == pytest.approx((v * w - c**2) / (v + w - 2 * c))
    assert contrast.mixture(alpha) == pytest.approx(7.0 - 2.0 * alpha)


def test_mixture_variance_is_that_of_the_mixed_sums(sums):
    x, y, treated = sums
    contrast = inference.difference_in_sums(moments_of(x, y, treated), ORIGIN)
    for alpha in (-1.0, 0.0, 0.3, 1.0, 2.0):
        mixed = alpha * x + (1 - alpha) * y
        expected = inference.difference_in_sums(moments_of(mixed, mixed, treated), ORIGIN)
        assert contrast.mixture(alpha) == pytest.approx(expected.response, rel=1e-10)
        assert contrast.mixture_variance(alpha) == pytest.approx(
            expected.variance_response, rel=1e-9
        )


@pytest.mark.parametrize(
    ("v", "w", "c"), [(0.0, 0.0, 0.0), (2.0, 2.0, 2.0), (3.0, 3.0, 3.0 - 1e-15)]
)
def test_weight_is_one_half_where_no_weight_is_better(v, w, c):
    assert inference.WindowContrast(1.0, 2.0, v, w, c).best_weight == 0.5


# --------------------------------------------------------------------------------------------------
# Little's law and tails
# --------------------------------------------------------------------------------------------------


def number_at(arrival, departure, carried, time):
    """Return the number in system at a time that is no event."""
    present = np.sum((arrival < time) & (departure > time)) + np.sum(carried > time)
    return float(present)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), min_size=2, max_size=40),
    carried=st.lists(st.integers(-5, 60), max_size=4),
)
def test_littles_law_means_by_brute_force(rows, carried):
    gaps, responses = np.array(rows, dtype=float).T
    assume(gaps[1:].any() and responses.any())
    arrival = np.cumsum(gaps)
    departure = arrival + responses
    carried = arrival[0] + np.array(carried, dtype=float)
    found = inference.littles_law_means(arrival, departure, carried)
    span = arrival[-1] - arrival[0]
    carried = carried[carried > arrival[0]]
    # All events are at integers: halfway between, the number in system is what it is in between.
    middles = np.arange(arrival[0], arrival[-1]) + 0.5
    numbers = [number_at(arrival, departure, carried, t) for t in middles]
    number = math.fsum(numbers) / span
    rate = (arrival.size - 1) / span
    assert found.arrival_rate.value == pytest.approx(rate, rel=1e-12)
    assert found.number_in_system.value == pytest.approx(number, rel=1e-9, abs=1e-11)
    assert found.response.value == pytest.approx(number / rate, rel=1e-9, abs=1e-11)
    law = inference.littles_law(arrival, departure, None, carried)
    assert found.number_in_system.value == pytest.approx(law.number_in_system, rel=1e-9, abs=1e-11)
    for mean in found:
        assert mean.standard_error >= 0.0


def single_server(rng, load, n):
    """Return arrivals and departures of M/M/1 with mean service time 1, from an empty system."""
    arrival = np.cumsum(rng.exponential(1.0 / load, n))
    served = np.cumsum(rng.exponential(size=n))
    before = np.concatenate(([0.0], served[:-1]))
    return arrival, served + np.maximum.accumulate(arrival - before)


def test_littles_law_means_of_a_single_server():
    """M/M/1 at load 0.5: rate 0.5, one task in system, response time 2; the errors are honest."""
    rng = np.random.default_rng(32)
    n, draws = 20_000, 120
    exact = np.array([0.5, 1.0, 2.0])
    found = [inference.littles_law_means(*single_server(rng, 0.5, n)) for _ in range(draws)]
    values = np.array([[mean.value for mean in row] for row in found])
    errors = np.array([[mean.standard_error for mean in row] for row in found])
    spread = values.std(axis=0, ddof=1)
    # Four and a half standard errors; the empty start costs the number of one task 4/n times 2.
    assert (np.abs(values.mean(axis=0) - exact) < 4.5 * spread / math.sqrt(draws) + 1e-3).all()
    assert (spread / math.sqrt(draws) < 0.005 * exact).all()
    # The spread of 120 values is known to 6.5 %.
    np.testing.assert_allclose(np.sqrt(np.mean(errors**2, axis=0)) / spread, 1.0, atol=0.3)
    # In theory, of the number: 2 rho (1 + rho) / (1 - rho)**4 over the time.
    theory = math.sqrt(2 * 0.5 * 1.5 / 0.5**4 / (n / 0.5))
    np.testing.assert_allclose(spread[1], theory, rtol=0.3)
    # By Little's law the response is known better, relatively, than the number.
    assert spread[2] / exact[2] < spread[1] / exact[1]


@pytest.mark.parametrize("index", [1.5, 4.0])
def test_hill_index_of_a_power_law(index):
    rng = np.random.default_rng(33)
    found = np.array([inference.hill_index(rng.pareto(index, 50_000) + 1.0) for _ in range(100)])
    values, errors = found.T
    # k log-spacings are exponential of mean 1 / index: k over their sum has the mean
    # index k / (k - 1) and the spread index / sqrt(k - 2), with k = 50.
    spread = index / math.sqrt(48) * 50 / 49
    assert abs(values.mean() - index * 50 / 49) < 4.5 * spread / math.sqrt(100)
    assert values.std() == pytest.approx(spread, rel=0.35)
    np.testing.assert_allclose(errors, values / math.sqrt(50))


def test_hill_index_by_hand():
    values = np.array([1.0, 2.0, 4.0, 8.0])
    # The two largest above 2: log 2 + log 4.
    index, error = inference.hill_index(values)
    assert index == pytest.approx(2.0 / (3.0 * math.log(2.0)), rel=1e-14)
    assert error == pytest.approx(index / math.sqrt(2.0), rel=1e-14)
    assert inference.hill_index(np.ones(10))[0] == math.inf
    assert inference.hill_index(np.array([0.0, 0.0, 1.0]))[0] == math.inf
    # At least 20 of many, at most half of few, and else a thousandth.
    many = np.exp(np.arange(1.0, 30_001.0) / 1e4)
    for size, k in ((30, 15), (1000, 20), (30_000, 30)):
        index, error = inference.hill_index(many[:size])
        assert index == pytest.approx(k / (1e-4 * k * (k + 1) / 2.0), rel=1e-6)
        assert error == pytest.approx(index / math.sqrt(k))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=30),
    carried=st.lists(st.integers(-3, 9), max_size=4),
)
def test_found_on_arrival_counts_tasks_one_by_one(rows, carried):
    gaps, responses = np.array(rows, dtype=float).T
    arrival = np.cumsum(gaps)
    departure = arrival + responses
    carried = arrival[0] + np.array(carried, dtype=float)
    found = inference.found_on_arrival(arrival, departure, carried)
    for k, time in enumerate(arrival):
        assert found[k] == np.sum(departure[:k] > time) + np.sum(carried > time)
