"""Standard errors and intervals for dependent data. Arrays in, numbers out; no logs here.

Two kinds of estimate need two kinds of standard error.

A *difference of means* over tasks is linearised: with ``m1, m0`` the arms' means and ``n1, n0``
their counts, task i has the influence ``(W_i - m1)/n1`` if treated and ``-(W_i - m0)/n0``
otherwise. Response times of neighbouring tasks depend on each other, so the influences are first
summed over groups of neighbours (equal runs of tasks, or the periods of a switchback), and the
groups are taken as independent.

A *difference of truncated sums* gets the plug-in variance, as if the windows were independent. They
overlap, but the labels ``Z_i`` are drawn independently of each other and of all that came before,
so the terms ``(Z_i - p) Q_i`` are nearly uncorrelated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BATCHES = 30
TASKS_PER_BATCH = 10

# Of the test for a rate that varies.
ARRIVALS_PER_BIN = 100
MOST_BINS = 1000


class ConfidenceInterval(NamedTuple):
    """Ends of a confidence interval."""

    low: float
    high: float


class Contrast(NamedTuple):
    """A difference treated minus control, its variance, and the variance's degrees of freedom."""

    value: float
    variance: float
    degrees_of_freedom: float


class WindowContrast(NamedTuple):
    """Both differences in truncated sums, treated minus control, and their covariance matrix."""

    response: float
    queue: float
    variance_response: float
    variance_queue: float
    covariance: float


def confidence_interval(
    value: float, standard_error: float, degrees_of_freedom: float, level: float
) -> ConfidenceInterval:
    """Return the symmetric interval of Student's t, or of the normal law.

    Parameters
    ----------
    value, standard_error : float
    degrees_of_freedom : float
        Of the standard error; infinity for the normal law.
    level : float
        Confidence level, strictly between 0 and 1.

    Returns
    -------
    ConfidenceInterval
    """
    from scipy.special import ndtri, stdtrit  # here, so that importing qdq stays quick

    upper = 0.5 + 0.5 * level
    if math.isinf(degrees_of_freedom):
        quantile = float(ndtri(upper))
    else:
        quantile = float(stdtrit(degrees_of_freedom, upper))
    return ConfidenceInterval(value - quantile * standard_error, value + quantile * standard_error)


def batch_edges(first: int, stop: int) -> NDArray[np.int64]:
    """Cut the tasks ``first .. stop - 1`` into equal runs.

    Parameters
    ----------
    first, stop : int
        At least two tasks.

    Returns
    -------
    ndarray of int64, shape (B + 1,)
        Run b holds the tasks from edge b up to, not including, edge b + 1; lengths differ by at
        most one. B is 30, or as many as leave 10 tasks to a run, but at least 2.
    """
    batches = max(2, min(BATCHES, (stop - first) // TASKS_PER_BATCH))
    return first + (stop - first) * np.arange(batches + 1, dtype=np.int64) // batches


def batch_means(counts: NDArray[np.int64], sums: NDArray[np.float64]) -> Contrast:
    """Difference of means, with the variance from runs of tasks that hold both arms.

    With ``u_b`` the summed influence of run b, which add up to zero, the variance is ``B/(B - 1) *
    sum(u_b**2)``, with B - 1 degrees of freedom. Its bias is of the order of the correlation time
    over the length of a run.

    Parameters
    ----------
    counts : ndarray of int64, shape (B, 2)
        Tasks of each run, columns control and treatment; no column of zeros, B >= 2.
    sums : ndarray of float64, shape (B, 2)
        Their summed responses.

    Returns
    -------
    Contrast
    """
    total = counts.sum(axis=0)
    means = sums.sum(axis=0) / total
    influence = (sums - counts * means) / total
    batches = len(counts)
    variance = batches / (batches - 1) * float(np.sum((influence[:, 1] - influence[:, 0]) ** 2))
    return Contrast(float(means[1] - means[0]), variance, batches - 1)


def clustered(moments: NDArray[np.float64]) -> Contrast:
    """Difference of means, with the variance from clusters that each hold one arm only.

    The arms are drawn cluster by cluster, so each arm is a sample of its own: with K_z clusters and
    the influences ``u``, its part is ``V_z = K_z/(K_z - 1) * sum(u**2)`` and the variance is
    ``V_1 + V_0``. With clusters of equal size this is Welch's. The degrees of freedom are
    Satterthwaite's. A cluster counts by its tasks.

    Parameters
    ----------
    moments : ndarray of float64, shape (2, 6)
        A row an arm (0 control, 1 treatment): number of clusters, at least two; sums over clusters
        of the number of tasks c, of their summed responses S, of c^2, of S^2 and of c S. From each
        response the same number may have been taken off.

    Returns
    -------
    Contrast
    """
    clusters, tasks, total, tasks2, total2, product = moments.T
    means = total / tasks
    # The sum of (S - c mean)^2; a zero may come out as a rounding error below zero.
    spread = np.maximum(total2 - 2.0 * means * product + means**2 * tasks2, 0.0)
    spread[spread <= 1e-14 * total2] = 0.0
    parts = clusters / (clusters - 1.0) * spread / tasks**2
    variance = float(parts.sum())
    uncertainty = float(np.sum(parts**2 / (clusters - 1.0)))
    freedom = variance**2 / uncertainty if uncertainty > 0.0 else float(clusters.sum() - 2)
    return Contrast(float(means[1] - means[0]), variance, freedom)


def difference_in_sums(
    moments: NDArray[np.float64], propensity: float | None = None
) -> WindowContrast:
    """Differences in truncated sums from the moments of each arm, with their plug-in variances.

    Group means (``propensity=None``): difference of the arms' means; the covariance matrix is the
    sum over arms of the sample covariance matrix divided by the arm's count.

    Inverse propensity: mean over all windows of the scores ``(Z/p - (1 - Z)/(1 - p)) Q``; the
    covariance matrix is that of the scores divided by their number. The scores of an arm are its
    sums times a constant, so their moments follow from the arms' without a second pass.

    Parameters
    ----------
    moments : ndarray of float64, shape (2, 6)
        As `streaming.Sums.window_moments` returns; at least two windows an arm.
    propensity : float, optional
        Known probability of treatment, in (0, 1); None for group means.

    Returns
    -------
    WindowContrast
    """
    count = moments[:, 0]
    means = moments[:, 1:3]
    products = moments[:, 3:6]  # of response, of queue, of both
    if propensity is None:
        difference = means[1] - means[0]
        covariances = np.sum(products / ((count - 1.0) * count)[:, None], axis=0)
    else:
        weight = np.array([-1.0 / (1.0 - propensity), 1.0 / propensity])
        total = count.sum()
        scores = weight[:, None] * means
        difference = count @ scores / total
        away = scores - difference
        between = np.column_stack([away[:, 0] ** 2, away[:, 1] ** 2, away[:, 0] * away[:, 1]])
        covariances = (weight**2 @ products + count @ between) / ((total - 1.0) * total)
    return WindowContrast(*(float(x) for x in (*difference, *covariances)))


def best_weight(variance_response: float, variance_queue: float, covariance: float) -> float:
    """Weight of the response that gives the mixture the smallest variance.

    ``(V_q - C) / (V_w + V_q - 2 C)``, which may lie outside [0, 1]. The denominator is the variance
    of the difference of the two parts. Where that is zero to within rounding, every weight gives
    the same variance, and the weight is 1/2.

    Returns
    -------
    float
    """
    spread = variance_response + variance_queue - 2.0 * covariance
    if spread <= 1e-12 * (variance_response + variance_queue):
        return 0.5
    return (variance_queue - covariance) / spread


def mixture_variance(
    alpha: float, variance_response: float, variance_queue: float, covariance: float
) -> float:
    """Variance of ``alpha * response + (1 - alpha) * queue``.

    Returns
    -------
    float
    """
    beta = 1.0 - alpha
    variance = (
        alpha**2 * variance_response + 2.0 * alpha * beta * covariance + beta**2 * variance_queue
    )
    return max(variance, 0.0)  # a zero may come out as a rounding error below zero


# --------------------------------------------------------------------------------------------------
# Checks of a log
# --------------------------------------------------------------------------------------------------


def sample_ratio_p_value(treated: int, tasks: int, propensity: float) -> float:
    """P-value of the number of treated tasks, if each was treated with the same probability.

    Twice the smaller of the two tails of the binomial law, both with the number itself, at most 1.

    Parameters
    ----------
    treated, tasks : int
        ``0 <= treated <= tasks``.
    propensity : float
        Intended probability of treatment, in (0, 1).

    Returns
    -------
    float
    """
    from scipy.special import bdtr

    at_most = float(bdtr(treated, tasks, propensity))
    at_least = float(bdtr(tasks - treated, tasks, 1.0 - propensity))
    return min(1.0, 2.0 * min(at_most, at_least))


class RateTest(NamedTuple):
    """Whether the counts of arrivals vary more than those of a Poisson process of constant rate."""

    bins: int
    dispersion: float
    """Variance of the counts over their mean; 1 is expected if the rate is constant."""
    variation: float
    """Coefficient of variation of the rate between bins, the Poisson law's own part taken off."""
    p_value: float


def constant_rate(arrival: NDArray[np.float64]) -> RateTest | None:
    """Test for an arrival rate that varies, by the dispersion of counts in equal bins.

    Given the first and the last arrival, those of a Poisson process of constant rate lie uniformly
    between them, and (B - 1) times the dispersion is about chi-square with B - 1 degrees of
    freedom. Only large values count against a constant rate; bursts give them too. A variation that
    repeats within a bin is not seen.

    Parameters
    ----------
    arrival : ndarray of float64, shape (n,)
        Nondecreasing, not all equal.

    Returns
    -------
    RateTest or None
        With a bin for every 100 arrivals, at most 1,000 bins; None below two bins.
    """
    from scipy.special import chdtrc

    between = arrival[1:-1]
    bins = min(MOST_BINS, between.size // ARRIVALS_PER_BIN)
    if bins < 2:
        return None
    place = (between - arrival[0]) * (bins / (arrival[-1] - arrival[0]))
    # The product may round up to the number of bins.
    counts = np.bincount(np.minimum(place.astype(np.int64), bins - 1), minlength=bins)
    mean = between.size / bins
    dispersion = float(counts.var(ddof=1)) / mean
    variation = math.sqrt(max(dispersion - 1.0, 0.0) / mean)
    return RateTest(bins, dispersion, variation, float(chdtrc(bins - 1, (bins - 1) * dispersion)))


class LittlesLaw(NamedTuple):
    """Both sides of Little's law between the first and the last arrival, and why they differ."""

    number_in_system: float
    """Time average."""
    rate_times_response: float
    """Arrival rate times mean response time."""
    found_on_arrival: float
    """Mean number of tasks that arrivals find; the time average if arrivals are Poisson."""
    edge: float
    """Relative difference made by the log's ends: time that its tasks spend outside them."""
    unlogged: float
    """Relative difference made by tasks that were counted in the system but are not in the log."""


def littles_law(
    arrival: NDArray[np.float64],
    departure: NDArray[np.float64],
    in_system: NDArray[np.int64] | None = None,
    carried_departure: NDArray[np.float64] | None = None,
) -> LittlesLaw:
    """Compare the number in system with the arrival rate times the mean response time.

    The number in system is counted from the log's own tasks, so that both sides agree but for the
    log's ends: the time that tasks spend after the last arrival enters the response only, and that
    of tasks carried over from before the first arrival the number only. A count that was taken at
    each arrival adds what the log does not show, held until the next arrival; for a log that lacks
    no task this is zero.

    Parameters
    ----------
    arrival : ndarray of float64, shape (n,)
        Nondecreasing, not all equal.
    departure : ndarray of float64, shape (n,)
        ``>= arrival``; of positive response times on average.
    in_system : ndarray of int64, shape (n,), optional
        Tasks in system counted at each arrival.
    carried_departure : ndarray of float64, shape (m,), optional
        Departures of tasks that are not in the log and were in the system at its first arrival.

    Returns
    -------
    LittlesLaw
    """
    first, last = arrival[0], arrival[-1]
    carried = np.empty(0) if carried_departure is None else carried_departure
    carried = carried[carried > first]
    span = last - first
    inside = np.sum(np.minimum(departure, last) - arrival)
    inside += np.sum(np.minimum(carried, last) - first)

    # A task that leaves as it comes is never in the system.
    stays = departure > arrival
    left = np.sort(np.concatenate([departure[stays], carried]))
    came = carried.size + np.cumsum(stays) - stays
    found = came - np.searchsorted(left, arrival, side="right")
    unlogged = 0.0
    if in_system is not None:
        unlogged = float(np.sum((in_system - found)[:-1] * np.diff(arrival)))
        found = in_system

    number = float(inside) / span
    product = (arrival.size - 1) / span * float(np.mean(departure - arrival))
    return LittlesLaw(
        number_in_system=number + unlogged / span,
        rate_times_response=product,
        found_on_arrival=float(found.mean()),
        edge=number / product - 1.0,
        unlogged=unlogged / span / product,
    )


def share_of_largest(values: NDArray[np.float64], fraction: float = 0.001) -> float:
    """Share of the total that the largest values hold.

    Parameters
    ----------
    values : ndarray of float64, shape (n,)
        Nonnegative, not all zero.
    fraction : float, default 0.001
        Part of the values that counts as the largest, at least one value.

    Returns
    -------
    float
        Between `fraction`, for equal values, and 1; for exponential values ``fraction * (1 +
        log(1/fraction))``.
    """
    largest = max(1, round(fraction * values.size))
    return float(np.partition(values, -largest)[-largest:].sum() / values.sum())
