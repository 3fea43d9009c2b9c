"""Rules for the horizon of the DQ methods, from the log itself.

A longer horizon L cuts less off the response to a decision, and lets more noise in. What is cut off
can hardly be read off the estimates, which are noisy where it matters. But queues forget a decision
as they forget any other disturbance, and how they do that is seen in how long the number in system
stays correlated with itself: the share of a response that comes later than L arrivals is about the
share of the summed autocovariance that does (the regression hypothesis of Onsager).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qdq.inference import WindowContrast

if TYPE_CHECKING:
    from qdq.tasklog import TaskLog

RULES = ("rmse", "coverage")

# The remaining truncation bias that the rule "coverage" allows, in standard errors: the coverage of
# a nominal 95 % interval is then at least 94.28 %.
ALLOWED_BIAS = 0.25
# Prior of the slope: mean and standard deviation, in naive estimates.
_PRIOR_MEAN = 2.0
_PRIOR_SD = 2.0
# Windows side by side that the longest horizon leaves.
_FEWEST_WINDOWS = 32
# Slow curves are fitted only if that lowers the sum of squared errors by more: they are what noise
# looks like.
_WORSE_FIT = 4.0
# Relative error of the slopes that even a long log leaves: responses are no sum of exponentials.
_MISFIT = 0.03
# Lowest slope that a fit may start from, over the highest.
_LOW = 1e-3
_TIMES = 40
_REFITS = 2
# That tell how long responses stay correlated.
_SOME_WINDOWS = 4096
# Part of the naive difference that lasts: the next tasks at the same servers take back the rest.
_KEPT = 0.5
# How far the effect of full deployment is thought to be beyond the slope, over the slope.
_CURVATURE = 0.1


def grid(n_tasks: int, most: float = math.inf) -> NDArray[np.int64]:
    """Return the horizons that a rule chooses from: 1, 2, 3, 4, 6, 8, 12, ..., 2**k, 1.5 * 2**k.

    Parameters
    ----------
    n_tasks : int
        Tasks that count; the longest horizon is at most a 32nd of them.
    most : float, default infinity
        Longest horizon.

    Returns
    -------
    ndarray of int64
    """
    longest = max(1, int(min(n_tasks // _FEWEST_WINDOWS, most)))
    powers = 2 ** np.arange(longest.bit_length() + 1, dtype=np.int64)
    every = np.unique(np.concatenate((powers, 3 * powers[:-1])))
    return every[every <= longest]


@dataclass(frozen=True, eq=False)
class Decay:
    """How long the queues of a log remember.

    Attributes
    ----------
    horizons : ndarray of int64, shape (m,)
        Rising.
    variance : ndarray of float64, shape (m,)
        Of the sums over as many tasks.
    n_tasks : int
        Tasks that they come from.
    """

    horizons: NDArray[np.int64]
    variance: NDArray[np.float64]
    n_tasks: int

    def remaining_at(self, horizon: Any) -> Any:
        """Return the share of the summed autocovariance that comes after a horizon.

        With r(h) the autocovariance, the variance of a sum over L tasks is ``L r(0) + 2 sum((L - h)
        r(h), h < L)``, whose slope at L is ``r(0) + 2 sum(r(h), h <= L)``: it rises to the long-run
        variance as the share that is left falls to zero. To the slopes between the horizons a sum
        of curves ``1 - exp(-h/time)`` with weights >= 0 is fitted, as for a reversible Markov
        chain, with times no longer than the data ask for.

        Parameters
        ----------
        horizon : float or array_like of float

        Returns
        -------
        float or ndarray of float64
            From at most 1 falling towards 0.
        """
        times, weights = self._fit
        left = np.exp(-np.multiply.outer(np.asarray(horizon, np.float64), 1.0 / times)) @ weights
        return float(left) if np.ndim(horizon) == 0 else left

    @cached_property
    def _fit(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        from scipy.optimize import nnls  # here, so that importing qdq stays quick

        never = np.array([math.inf]), np.ones(1)
        if len(self.horizons) < 3:
            return never
        at = np.sqrt(self.horizons[1:] * self.horizons[:-1])
        slope = np.diff(self.variance) / np.diff(self.horizons)
        if not slope.max() > 0.0:
            return never
        # The relative error of such a slope is about that of a variance of n / L sums; it is over
        # what is fitted, since low slopes are not known better than high ones.
        relative = np.sqrt(_MISFIT**2 + 4.0 * at / self.n_tasks)
        times = np.geomspace(1.0, 0.5 * self.horizons[-1], _TIMES)
        curves = 1.0 - np.exp(-at[:, None] / times)
        fitted = np.maximum.accumulate(np.maximum(slope, max(slope[0], _LOW * slope.max())))
        for _ in range(_REFITS):
            error = relative * fitted
            scaled, wanted = curves / error[:, None], slope / error
            weights, misfit = nnls(scaled, wanted)
            allowed = misfit**2 + _WORSE_FIT
            # More curves never fit worse: the fewest that will do are found by halving.
            low, high = 0, _TIMES
            while high - low > 1:
                middle = (low + high) // 2
                fewer, misfit = nnls(scaled[:, :middle], wanted)
                if misfit**2 <= allowed:
                    high, weights = middle, fewer
                else:
                    low = middle
            if not weights.sum() > 0.0:
                return never
            fitted = curves[:, : len(weights)] @ weights
        return times[: len(weights)], weights / weights.sum()


class Memory:
    """How long the queues of a log remember, from its response times, found when asked for.

    Parameters
    ----------
    log : TaskLog
    """

    def __init__(self, log: TaskLog) -> None:
        self._log = log

    def __getstate__(self) -> dict[str, Any]:
        return {"decay": self.decay}  # without the log, which may be large

    @cached_property
    def decay(self) -> Decay:
        """By sums over windows here and there."""
        response = self._log.response_time[self._log.first_counted :]
        horizons = grid(response.size)
        total = np.concatenate(([0.0], np.cumsum(response - response.mean())))
        variance = []
        for span in horizons:
            begin = np.linspace(0, response.size - span, _SOME_WINDOWS).astype(np.int64)
            variance.append(float(np.mean((total[begin + span] - total[begin]) ** 2)))
        return Decay(horizons, np.array(variance), response.size)


def choose(
    rule: str,
    weights: NDArray[np.float64],
    contrasts: Sequence[WindowContrast],
    remaining: NDArray[np.float64],
    variance: NDArray[np.float64],
) -> int:
    """Choose among the horizons of the grid.

    The expectation at horizon L is taken to be ``B - (B - D/2) T_w(L)`` for the response and ``B -
    B T_q(L)`` for the queue, with the slope B, the naive difference D, of which the next tasks take
    back about half, and the shares T that are left. B has the prior of mean 2 D and standard
    deviation 2 D, updated by the estimate that is the most precise after it is freed from
    truncation.

    Parameters
    ----------
    rule : {"rmse", "coverage"}
        The horizon of the least mean squared error against the effect of full deployment, which is
        taken to be 10 % beyond the slope; or the least horizon whose truncation bias, against the
        slope, is below a quarter of the standard error.
    weights : ndarray of float64, shape (m,)
        Weight of the response in the estimate at each horizon: 1 for wDQ, 0 for qDQ.
    contrasts : sequence of WindowContrast
        Differences at each horizon, the first of which is 1.
    remaining : ndarray of float64, shape (m, 2)
        Shares left, of response and queue.
    variance : ndarray of float64, shape (m,)
        Of the estimate at each horizon.

    Returns
    -------
    int
        Place of the chosen horizon in the grid; the last one if none will do.
    """
    direct = contrasts[0].response
    mean, second = _PRIOR_MEAN * direct, (_PRIOR_SD * direct) ** 2
    found = [
        ((c.response - _KEPT * direct * t_w) / (1.0 - t_w), c.variance_response / (1.0 - t_w) ** 2)
        for c, (t_w, t_q) in zip(contrasts, remaining, strict=True)
        if max(t_w, t_q) < 0.5
    ]
    if found:
        value, uncertainty = min(found, key=lambda item: item[1])
        if second + uncertainty > 0.0:
            gain = second / (second + uncertainty)
            mean, second = mean + gain * (value - mean), gain * uncertainty
    t_w, t_q = remaining.T
    # The bias is linear in the slope B.
    by_slope = weights * t_w + (1.0 - weights) * t_q
    if rule == "rmse":
        by_slope = by_slope + _CURVATURE
    bias2 = (by_slope * mean - weights * t_w * _KEPT * direct) ** 2 + by_slope**2 * second
    if rule == "rmse":
        return int(np.argmin(bias2 + variance))
    small = np.flatnonzero(bias2 <= ALLOWED_BIAS**2 * variance)
    return int(small[0]) if small.size else len(contrasts) - 1
