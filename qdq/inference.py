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
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BATCHES = 32
MOST_TERMS = 32
FEWEST_TERMS = 4
SERIES_BIAS = 0.05
CYCLE_FALSE_ALARM = 1e-3
# Spectra that are tried: memory over white noise, and the frequency up to which it is flat.
MEMORY_RATIOS = np.array([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0])
MEMORY_KNEES = np.geomspace(0.5, 64.0, 15)
MEMORY_PENALTY = 4.0  # on twice the log likelihood, by Akaike's criterion for two parameters
TIME_SPANS = 256

# Of the test for a rate that varies.
ARRIVALS_PER_BIN = 100
MOST_BINS = 1000


class ConfidenceInterval(NamedTuple):
    """Ends of a confidence interval."""

    low: float
    high: float


class Spread(NamedTuple):
    """A variance, and its degrees of freedom."""

    variance: float
    degrees_of_freedom: float


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

    @property
    def best_weight(self) -> float:
        """Weight of the response that gives the mixture the smallest variance.

        ``(V_q - C) / (V_w + V_q - 2 C)``, which may lie outside [0, 1]. The denominator is the
        variance of the difference of the two parts. Where that is zero to within rounding, every
        weight gives the same variance, and the weight is 1/2.
        """
        v_w, v_q, c = self.variance_response, self.variance_queue, self.covariance
        spread = v_w + v_q - 2.0 * c
        if spread <= 1e-12 * (v_w + v_q):
            return 0.5
        return (v_q - c) / spread

    def mixture(self, alpha: float) -> float:
        """Return ``alpha * response + (1 - alpha) * queue``."""
        return alpha * self.response + (1.0 - alpha) * self.queue

    def mixture_variance(self, alpha: float) -> float:
        """Return the variance of the mixture with a weight that is given."""
        beta = 1.0 - alpha
        variance = alpha**2 * self.variance_response + beta**2 * self.variance_queue
        variance += 2.0 * alpha * beta * self.covariance
        return max(variance, 0.0)  # a zero may come out as a rounding error below zero


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


def influence(
    counts: NDArray[np.float64], sums: NDArray[np.float64], propensity: float | None = None
) -> NDArray[np.float64]:
    """Return what each block of units adds to the errors of differences treated minus control.

    Parameters
    ----------
    counts : ndarray of float64, shape (B, 2)
        Units (tasks, windows) of each block, columns control and treatment; no column of zeros.
    sums : ndarray of float64, shape (B, 2, m)
        Their sums of m variables.
    propensity : float, optional
        For inverse propensity; None for a difference of the arms' means.

    Returns
    -------
    ndarray of float64, shape (B, m)
        Columns add up to zero: to first order, the error is the sum of a block's influences with
        the true means in place of the estimated ones.
    """
    if propensity is None:
        total = counts.sum(axis=0)[:, None]
        means = sums.sum(axis=0) / total
        parts = (sums - counts[:, :, None] * means) / total
        influence: NDArray[np.float64] = parts[:, 1] - parts[:, 0]
        return influence
    scores = sums[:, 1] / propensity - sums[:, 0] / (1.0 - propensity)
    value = scores.sum(axis=0) / counts.sum()
    influence = (scores - counts.sum(axis=1)[:, None] * value) / counts.sum()
    return influence


def merged(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Merge neighbouring blocks, as many to one as leave at most 32, the last one shorter.

    Parameters
    ----------
    blocks : ndarray of float64, shape (B, ...)

    Returns
    -------
    ndarray of float64, shape (B', ...)
    """
    by = -(-len(blocks) // BATCHES)
    merged: NDArray[np.float64] = np.add.reduceat(blocks, np.arange(0, len(blocks), by), axis=0)
    return merged


def batch_means(units: NDArray[np.float64], influence: NDArray[np.float64]) -> Spread:
    """Variance of the sum of the influences of blocks, taken as independent.

    With the shares ``w`` of the blocks and their influences ``u``, the variance is ``sum(u**2) / (1
    - sum(w**2))`` with B - 1 degrees of freedom; for equal blocks it is that of batch means. Its
    bias is of the order of the correlation time over the length of a block.

    Parameters
    ----------
    units : ndarray of float64, shape (B,)
        Units of each block.
    influence : ndarray of float64, shape (B,)
        Adding up to zero.

    Returns
    -------
    Spread
    """
    share = units / units.sum()
    room = 1.0 - float(np.sum(share**2))
    return Spread(float(np.sum(influence**2)) / room, len(units) - 1)


def series(units: NDArray[np.float64], influence: NDArray[np.float64]) -> Spread:
    """Long-run variance from the slowest cosines of the influences.

    With ``u_b`` the influences of blocks whose middles lie at the shares ``t_b`` of the experiment,
    ``a_j = sqrt(2) sum(cos(pi j t_b) u_b)`` for j = 1 .. K are about independent with the variance
    sought, as long as the spectrum is flat up to the K-th frequency: their mean square estimates
    it, with K degrees of freedom.

    K is at most 32, and such that the spectrum fitted by `flat_terms` biases the mean square by
    no more than 5 %. A term far above all those of up to half its frequency is a cycle, such as
    that of a periodic rate, which averages out and is no noise: then K is at most a third of its j,
    where little of it leaks to.

    Parameters
    ----------
    units, influence
        As for `batch_means`.

    Returns
    -------
    Spread

    References
    ----------
    E. Lazarus, D. Lewis, J. Stock, M. Watson, HAR inference: recommendations for practice, 2018.
    """
    from scipy.special import fdtri

    blocks = len(units)
    if blocks < 2 * FEWEST_TERMS:
        return batch_means(units, influence)
    squares = 2.0 * (_cosines(units.astype(np.float64).tobytes()) @ influence) ** 2
    if not squares.any():
        return Spread(0.0, MOST_TERMS)

    slower = np.maximum(np.arange(1, len(squares) + 1) // 2, 1)
    mean = np.cumsum(squares)[slower - 1] / slower
    first = 2 * FEWEST_TERMS
    false_alarm = CYCLE_FALSE_ALARM / max(len(squares) - first, 1)
    standing_out = squares > fdtri(1.0, slower, 1.0 - false_alarm) * mean
    standing_out[:first] = False
    clean = len(squares)
    if standing_out.any():
        clean = max(int(np.argmax(standing_out) + 1) // 3, FEWEST_TERMS)
    terms = min(flat_terms(squares[:clean]), clean)
    return Spread(float(np.mean(squares[:terms])), terms)


@lru_cache(maxsize=16)
def _cosines(units: bytes) -> NDArray[np.float64]:
    """Return ``cos(pi j t_b)`` for the middles t_b of blocks; most logs have equal ones."""
    size = np.frombuffer(units)
    end = np.cumsum(size)
    middle = (end - 0.5 * size) / end[-1]
    cosines: NDArray[np.float64] = np.cos(
        math.pi * np.outer(np.arange(1, len(size) // 2 + 1), middle)
    )
    cosines.flags.writeable = False
    return cosines


@lru_cache(maxsize=16)
def _spectra(terms: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the spectra that `flat_terms` tries, and the sums of their logarithms."""
    memory = 1.0 / (1.0 + (np.arange(1, terms + 1) / MEMORY_KNEES[:, None]) ** 2)
    spectra = 1.0 + MEMORY_RATIOS[:, None, None] * memory
    of_logs = np.log(spectra).sum(axis=-1)
    spectra.flags.writeable = of_logs.flags.writeable = False
    return spectra, of_logs


def flat_terms(squares: NDArray[np.float64]) -> int:
    """Return up to which frequency the spectrum of the influences is flat.

    The squares are exponential variables around the spectrum ``1 + r / (1 + (j / k)**2)``, white
    noise and exponential memory, times a constant: r and k are found by maximum likelihood
    (Whittle's) on a grid. Where that is no better than white noise, by Akaike's criterion, 32 terms
    are flat; else as many as have a mean at most 5 % below the spectrum at zero, but no fewer than
    4.

    Parameters
    ----------
    squares : ndarray of float64, shape (m,)
        Of the cosines j = 1 .. m; not all zero.

    Returns
    -------
    int
    """
    j = np.arange(1, len(squares) + 1)
    spectra, of_logs = _spectra(len(squares))
    level = np.mean(squares / spectra, axis=-1)
    loss = len(squares) * np.log(level) + of_logs
    white = len(squares) * math.log(squares.mean())
    most = min(MOST_TERMS, len(squares))
    if 2.0 * (white - loss.min()) < MEMORY_PENALTY:
        return most
    best = np.unravel_index(np.argmin(loss), loss.shape)
    ratio, knee = MEMORY_RATIOS[best[0]], MEMORY_KNEES[best[1]]
    share = np.cumsum(1.0 + ratio / (1.0 + (j / knee) ** 2)) / j / (1.0 + ratio)
    flat = int(np.count_nonzero(share >= 1.0 - SERIES_BIAS))
    return max(min(flat, most), min(FEWEST_TERMS, most))


def jackknife(
    blocks: NDArray[np.float64], estimate: Callable[[NDArray[np.float64]], float]
) -> Spread:
    """Variance by leaving out one block after the other, whatever the estimate is.

    With h_b the experiment's units over those of block b, ``v_b = h_b x - (h_b - 1) x_(-b)`` are as
    many pseudo-values; the variance is the mean of ``(v_b - sum(v / h))**2 / (h_b - 1)``.

    Parameters
    ----------
    blocks : ndarray of float64, shape (B, 2, k)
        Sums of each block and arm, the first of them the number of units.
    estimate : callable
        ``estimate(sums)`` of the sums (2, k) of some blocks.

    Returns
    -------
    Spread

    References
    ----------
    F. Busing, E. Meijer, R. van der Leeden, Delete-m jackknife for unequal m, 1999.
    """
    total = blocks.sum(axis=0)
    whole = estimate(total)
    size = blocks[:, :, 0].sum(axis=1)
    h = size.sum() / size
    pseudo = np.array(
        [h[b] * whole - (h[b] - 1.0) * estimate(total - x) for b, x in enumerate(blocks)]
    )
    away = pseudo - np.sum(pseudo / h)
    variance = float(np.mean(away**2 / (h - 1.0)))
    return Spread(variance, len(blocks) - 1)


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


def difference_of_means(sums: NDArray[np.float64]) -> Contrast:
    """Difference of the arms' means, with the variance of independent tasks.

    Parameters
    ----------
    sums : ndarray of float64, shape (2, 3)
        A row an arm: tasks; sums of their responses and of the squares of these, from which the
        same number may have been taken off.

    Returns
    -------
    Contrast
    """
    count, x, xx = sums.T
    spread = np.maximum(xx - x * x / count, 0.0)
    # An arm of one task tells nothing of its variance.
    parts = spread / (np.maximum(count - 1.0, 1.0) * count)
    mean = x / count
    return Contrast(float(mean[1] - mean[0]), float(parts.sum()), math.inf)


def within(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the variances of both truncated sums within the arms.

    Parameters
    ----------
    sums : ndarray of float64, shape (2, 6)
        As for `difference_in_sums`.

    Returns
    -------
    ndarray of float64, shape (2,)
        Of response and of queue.
    """
    count = sums[:, :1]
    spread = np.maximum(sums[:, 3:5] - sums[:, 1:3] ** 2 / count, 0.0)
    variance: NDArray[np.float64] = spread.sum(axis=0) / count.sum()
    return variance


def difference_in_sums(
    sums: NDArray[np.float64], origin: NDArray[np.float64], propensity: float | None = None
) -> WindowContrast:
    """Differences in truncated sums, with the variances of independent windows.

    Group means (``propensity=None``): difference of the arms' means; the covariance matrix is the
    sum over arms of the sample covariance matrix divided by the arm's count.

    Inverse propensity: mean over all windows of the scores ``(Z/p - (1 - Z)/(1 - p)) Q``; the
    covariance matrix is that of the scores divided by their number. The scores of an arm are its
    sums times a constant, so their moments follow from the arms' without a second pass.

    Parameters
    ----------
    sums : ndarray of float64, shape (2, 6)
        A row an arm: windows, at least two; sums of response and of queue, of their squares, and of
        their products.
    origin : ndarray of float64, shape (2,)
        What was taken off each response and queue there.
    propensity : float, optional
        Known probability of treatment, in (0, 1); None for group means.

    Returns
    -------
    WindowContrast
    """
    count, x, y, xx, yy, xy = sums.T
    means = sums[:, 1:3] / count[:, None]
    products = np.column_stack(
        [
            np.maximum(xx - x * x / count, 0.0),
            np.maximum(yy - y * y / count, 0.0),
            xy - x * y / count,
        ]
    )
    if propensity is None:
        difference = means[1] - means[0]
        covariances = np.sum(products / ((count - 1.0) * count)[:, None], axis=0)
    else:
        weight = np.array([-1.0 / (1.0 - propensity), 1.0 / propensity])
        total = count.sum()
        scores = weight[:, None] * (means + origin)
        difference = count @ scores / total
        away = scores - difference
        between = np.column_stack([away[:, 0] ** 2, away[:, 1] ** 2, away[:, 0] * away[:, 1]])
        covariances = (weight**2 @ products + count @ between) / ((total - 1.0) * total)
    return WindowContrast(*(float(x) for x in (*difference, *covariances)))


def spread(
    by: str,
    score: Spread,
    blocks: NDArray[np.float64],
    influence: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    estimate: Callable[[NDArray[np.float64]], float],
) -> Spread:
    """Return the variance of an estimate in the way that is asked for.

    Parameters
    ----------
    by : {"score", "hac", "batch_means", "jackknife"}
    score : Spread
        What "score" is to return, and the others where there is but one block; the jackknife too
        where one of its blocks has all units of an arm.
    blocks : ndarray of float64, shape (B, 2, k)
        Sums of each block and arm, the first of them the number of units.
    influence : callable
        ``influence(blocks)`` gives what each of them adds to the error, shape (B,).
    estimate : callable
        ``estimate(sums)`` of the sums (2, k) of some blocks.

    Returns
    -------
    Spread
    """
    if by == "score" or len(blocks) < 2:
        return score
    if by == "hac":
        return series(blocks[:, :, 0].sum(axis=1), influence(blocks))
    blocks = merged(blocks)
    if by == "batch_means":
        return batch_means(blocks[:, :, 0].sum(axis=1), influence(blocks))
    if np.any(blocks[:, :, 0].max(axis=0) == blocks[:, :, 0].sum(axis=0)):
        return score
    return jackknife(blocks, estimate)


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


def found_on_arrival(
    arrival: NDArray[np.float64],
    departure: NDArray[np.float64],
    carried_departure: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Count the tasks that each arrival finds in the system.

    Parameters
    ----------
    arrival, departure, carried_departure
        As for `littles_law`.

    Returns
    -------
    ndarray of int64, shape (n,)
    """
    carried = carried_departure[carried_departure > arrival[0]]
    # A task that leaves as it comes is never in the system.
    stays = departure > arrival
    left = np.sort(np.concatenate([departure[stays], carried]))
    came = carried.size + np.cumsum(stays) - stays
    found: NDArray[np.int64] = came - np.searchsorted(left, arrival, side="right")
    return found


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

    found = found_on_arrival(arrival, departure, carried)
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


class Mean(NamedTuple):
    """A time average or a mean over tasks, and its standard error."""

    value: float
    standard_error: float
    degrees_of_freedom: float


class LittlesLawMeans(NamedTuple):
    """The three quantities of Little's law, each with its standard error."""

    arrival_rate: Mean
    number_in_system: Mean
    response: Mean
    """Number in system over arrival rate: what tasks spend between the log's ends."""


def littles_law_means(
    arrival: NDArray[np.float64],
    departure: NDArray[np.float64],
    carried_departure: NDArray[np.float64] | None = None,
) -> LittlesLawMeans:
    """Estimate arrival rate, number in system and, by Little's law, mean response.

    The time from the first arrival to the last is cut into 256 equal spans. With N_k arrivals and
    the area A_k under the number in system in span k, of length s, and with N, A and T their sums,
    the errors are to first order the sums of ``(N_k - s N/T)/T``, ``(A_k - s A/T)/T`` and ``(A_k -
    N_k A/N)/N``; their long-run variance is that of `series`. The last ratio has a smaller one than
    the number in system, since busy spans have more arrivals too.

    Parameters
    ----------
    arrival, departure, carried_departure
        As for `littles_law`.

    Returns
    -------
    LittlesLawMeans

    References
    ----------
    S.-H. Kim, W. Whitt, Statistical analysis with Little's law, 2013.
    """
    first, last = arrival[0], arrival[-1]
    carried = np.empty(0) if carried_departure is None else carried_departure
    left = np.sort(np.concatenate([departure, carried[carried > first]]))
    came = np.concatenate([np.full(left.size - arrival.size, first), arrival])
    edges = np.linspace(first, last, TIME_SPANS + 1)
    arrived = np.searchsorted(came, edges, side="right")
    gone = np.searchsorted(left, edges, side="right")
    sum_of_came, sum_of_left = (np.concatenate(([0.0], np.cumsum(x - first))) for x in (came, left))
    # Task by task, the time spent in the system up to each edge.
    spent = sum_of_left[gone] + (edges - first) * (arrived - gone) - sum_of_came[arrived]
    number = np.diff(np.searchsorted(arrival, edges[:-1], side="left"), append=arrival.size - 1)
    area, count = np.diff(spent), number.astype(np.float64)
    length = np.full(TIME_SPANS, (last - first) / TIME_SPANS)

    def ratio(x: NDArray[np.float64], by: NDArray[np.float64]) -> Mean:
        value = float(x.sum() / by.sum())
        variance, freedom = series(by, (x - value * by) / by.sum())
        return Mean(value, math.sqrt(variance), freedom)

    return LittlesLawMeans(ratio(count, length), ratio(area, length), ratio(area, count))


def hill_index(values: NDArray[np.float64], fraction: float = 0.001) -> tuple[float, float]:
    """Estimate the tail index from the largest values.

    Parameters
    ----------
    values : ndarray of float64, shape (n,)
        Nonnegative, not all zero.
    fraction : float, default 0.001
        Part of the values that counts as the largest, at least 20 and at most half of them.

    Returns
    -------
    index, standard_error : float
        With k values above the next one x, ``k / sum(log(value / x))``, and that over ``sqrt(k)``,
        as if the k were independent; infinity if they are all equal. A moment of an order above the
        index is infinite, if the tail is a power's.

    References
    ----------
    B. Hill, A simple general approach to inference about the tail of a distribution, 1975.
    """
    k = max(1, min(max(20, round(fraction * values.size)), values.size // 2))
    largest = np.partition(values, -k - 1)[-k - 1 :]
    spacing = float(np.sum(np.log(largest[1:] / largest[0]))) if largest[0] > 0.0 else 0.0
    index = k / spacing if spacing > 0.0 else math.inf
    return index, index / math.sqrt(k)


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
