"""Estimates of a policy's effect on the mean response time, from the log of an experiment.

Tasks ``i = 0 .. n-1`` in order of arrival; arm ``Z_i`` (1 treated), response ``W_i = D_i - A_i``,
and ``q_k`` = tasks ``j < k`` with ``D_j > A_k``, those that arrival k finds in the system. The
estimand is the global treatment effect: the long-run mean response with everybody treated, minus
that with nobody treated.

- `naive`: difference of the arms' mean responses. Both arms meet the same queues, so it misses what
  each arm does to the tasks that come later.
- `dq_response`, `dq_queue` (Differences-in-Q): the response of a task is replaced by what happens
  over the next L arrivals, ``Qw_i = W_i + ... + W_{i+L-1}`` or, by Little's law, ``Qq_i = (q_{i+1}
  + ... + q_{i+L}) / r`` with the total arrival rate r.
- `dq_mixed`: ``alpha wDQ + (1 - alpha) qDQ`` with the weight that makes the estimated variance
  smallest.
- `switchback`, `server_split`: differences of means for logs of the designs of these names.

Tasks that arrive before the log's ``skip`` open no window and enter no mean; they do count in
``q_k``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qdq import inference, kernels, validation
from qdq.designs import AllControl, AllTreatment, Bernoulli, Design, ServerSplit, Switchback
from qdq.inference import ConfidenceInterval
from qdq.scenario import ArrivalTrace, Periodic
from qdq.tasklog import TaskLog

if TYPE_CHECKING:
    import pandas as pd

ArrivalRate: TypeAlias = (
    "float | str | Callable[[NDArray[np.float64]], NDArray[np.float64] | float]"
)

NORMALISATIONS = ("group_means", "inverse_propensity")
QUEUES = ("in_system", "including_self", "waiting", "time_average")
RATES = ("estimated", "window", "scenario")

_DQ = ("dq_response", "dq_queue", "dq_mixed")
METHODS_OF: dict[type[Design], tuple[str, ...]] = {
    Bernoulli: ("naive", *_DQ),
    Switchback: ("switchback",),
    ServerSplit: ("server_split",),
    AllControl: (),
    AllTreatment: (),
}
METHODS = tuple(name for names in METHODS_OF.values() for name in names)

# The frame's columns and their types; "Int64" and "object" have room for a missing value.
_COLUMNS = {
    "method": "object",
    "value": "float64",
    "standard_error": "float64",
    "low": "float64",
    "high": "float64",
    "horizon": "Int64",
    "n_used": "int64",
    "alpha": "float64",
    "normalise": "object",
    "queue": "object",
    "arrival_rate": "object",
}

FEW_PERIODS = 10


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Estimate:
    """One estimate of the effect on the mean response time, in the log's unit of time.

    A field that does not apply to the method is None.
    """

    method: str
    """Name of the function that made it."""
    value: float
    """Treated minus control."""
    standard_error: float
    level: float
    """Confidence level of `low` and `high`."""
    degrees_of_freedom: float
    """Of the standard error; infinite where the interval is the normal law's."""
    n_used: int
    """Tasks (naive, switchback, split) or windows (DQ) that enter."""
    horizon: int | None = None
    """L, the number of arrivals that a window spans."""
    alpha: float | None = None
    """Weight of the response in the mixture; outside [0, 1] the mixture extrapolates."""
    normalise: str | None = None
    queue: str | None = None
    arrival_rate: float | str | None = None
    """How the arrival rate was read: a number, "estimated", "window", "scenario", or "function" for
    a callable."""
    variance_response: float | None = None
    """Variance of wDQ."""
    variance_queue: float | None = None
    """Variance of qDQ."""
    covariance: float | None = None
    """Covariance of wDQ and qDQ."""

    @property
    def low(self) -> float:
        """Lower end of the confidence interval."""
        return self.confidence_interval().low

    @property
    def high(self) -> float:
        """Upper end of the confidence interval."""
        return self.confidence_interval().high

    def confidence_interval(self, level: float | None = None) -> ConfidenceInterval:
        """Return the confidence interval at a level, by default the estimate's own.

        Raises
        ------
        TypeError, ValueError
            If the level is not a number strictly between 0 and 1.
        """
        level = self.level if level is None else _check_level(level)
        return inference.confidence_interval(
            self.value, self.standard_error, self.degrees_of_freedom, level
        )

    def to_frame(self) -> pd.DataFrame:
        """Return the estimate as a frame of one row, with the columns of `estimate`."""
        return _frame([self])

    def _settings(self) -> str:
        """Say in words which tasks and which variant the estimate comes from."""
        said = [f"n_used={self.n_used}"]
        for name in ("horizon", "alpha", "normalise", "queue", "arrival_rate"):
            value = getattr(self, name)
            if value is not None:
                said.append(
                    f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                )
        return ", ".join(said)

    def __repr__(self) -> str:
        return (
            f"{self.method}: {self.value:.6g}, standard error {self.standard_error:.3g}, "
            f"{100 * self.level:g} % interval [{self.low:.6g}, {self.high:.6g}] "
            f"({self._settings()})"
        )

    def _repr_html_(self) -> str:
        cells = (
            ("value", f"{self.value:.6g}"),
            ("standard error", f"{self.standard_error:.3g}"),
            (f"{100 * self.level:g} % interval", f"[{self.low:.6g}, {self.high:.6g}]"),
            ("from", self._settings()),
        )
        rows = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in cells)
        return f"<table><caption>{escape(self.method)}</caption><tbody>{rows}</tbody></table>"


def naive(log: TaskLog, *, level: float = 0.95) -> Estimate:
    """Difference of the arms' mean response times, with a batch-means standard error.

    Parameters
    ----------
    log : TaskLog
        Of a Bernoulli experiment, or from outside.
    level : float, default 0.95
        Confidence level.

    Returns
    -------
    Estimate
        Its interval is for the direct effect, which the naive estimator converges to, not for the
        global effect.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, the log is of another design, or an arm is empty.
    """
    return estimates_of(log, ["naive"], level=level)[0]


def dq_response(
    log: TaskLog,
    *,
    horizon: int | None = None,
    normalise: str = "group_means",
    level: float = 0.95,
) -> Estimate:
    """Difference in truncated sums of response times (wDQ).

    Parameters
    ----------
    log : TaskLog
        Of a Bernoulli experiment, or from outside.
    horizon : int, optional
        L, the number of arrivals that a window spans, from 1 to below the number of tasks. By
        default ``floor(30 N lam)`` of the log's scenario; for a log from outside ``floor(30 * rate
        * mean service time)`` with the estimated arrival rate, if it has service times.
    normalise : {"group_means", "inverse_propensity"}, default "group_means"
        Difference of the arms' means, or mean of ``(Z/p - (1 - Z)/(1 - p)) Q`` with the log's known
        propensity p.
    level : float, default 0.95
        Confidence level.

    Returns
    -------
    Estimate

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, the log is of another design, an arm has fewer than two windows, or
        the propensity is needed and not known.

    References
    ----------
    V. Farias, A. Li, T. Peng, A. Zheng, Markovian interference in experiments, 2022.
    """
    return estimates_of(log, ["dq_response"], horizon=horizon, normalise=normalise, level=level)[0]


def dq_queue(
    log: TaskLog,
    *,
    horizon: int | None = None,
    normalise: str = "group_means",
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    level: float = 0.95,
) -> Estimate:
    """Difference in truncated sums of the number in system (qDQ), in time by Little's law.

    Parameters
    ----------
    log, horizon, normalise, level
        As for `dq_response`.
    queue : {"in_system", "including_self", "waiting", "time_average"}, default "in_system"
        What the queue sum of window i adds up: ``q_k / r`` over ``k = i+1 .. i+L``; the same with
        ``q_k + 1``; with the tasks not yet in service only (it needs service times, or servers that
        are FCFS); or the integral of the number in system from arrival i to arrival i + L, which
        needs no rate.
    arrival_rate : float, callable or {"estimated", "window", "scenario"}, optional
        The total arrival rate r: a number > 0; a function of time, called with the array of arrival
        times or, where it takes no array, time by time; ``"estimated"``, ``(n - 1)/(A_{n-1} -
        A_0)``; ``"window"``, ``L/(A_{i+L} - A_i)``; ``"scenario"``, the scenario's rate at each
        arrival. By default ``"scenario"`` for logs simulated with `Periodic` arrivals and
        ``"estimated"`` otherwise. Ignored by ``queue="time_average"``.

    Returns
    -------
    Estimate

    Raises
    ------
    TypeError, ValueError
        As for `dq_response`, or if the log lacks what `queue` or `arrival_rate` needs.

    Notes
    -----
    Arrivals oversample busy times: under a rate that varies, dividing by its mean can be biased by
    tens of per cent.
    """
    return estimates_of(
        log,
        ["dq_queue"],
        horizon=horizon,
        normalise=normalise,
        queue=queue,
        arrival_rate=arrival_rate,
        level=level,
    )[0]


def dq_mixed(
    log: TaskLog,
    *,
    horizon: int | None = None,
    normalise: str = "group_means",
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    level: float = 0.95,
) -> Estimate:
    """Mixture ``alpha wDQ + (1 - alpha) qDQ`` of the smallest estimated variance.

    Parameters
    ----------
    log, horizon, normalise, level
        As for `dq_response`.
    queue, arrival_rate
        As for `dq_queue`; ``queue="waiting"`` is refused when the service rates are known to
        differ, since the effect on waiting then is not the effect on the response.

    Returns
    -------
    Estimate

    Raises
    ------
    TypeError, ValueError
        As for `dq_queue`.

    Notes
    -----
    ``alpha = (V_q - C) / (V_w + V_q - 2 C)`` with the variances and the covariance of the two
    differences: within-arm sample covariances divided by the counts (group means), or the sample
    covariances of the weighted scores divided by their number (inverse propensity). The standard
    error takes alpha as given. Where both parts have the same deviations to within rounding, every
    weight gives the same variance and alpha is 1/2.
    """
    return estimates_of(
        log,
        ["dq_mixed"],
        horizon=horizon,
        normalise=normalise,
        queue=queue,
        arrival_rate=arrival_rate,
        level=level,
    )[0]


def switchback(log: TaskLog, *, washout: float = 0.0, level: float = 0.95) -> Estimate:
    """Mean response over treated periods minus that over control periods, weighted by tasks.

    The first `washout` of every period is dropped, and so is the last period, which the end of the
    log cuts short. The variance is clustered by period.

    Parameters
    ----------
    log : TaskLog
        Of a `Switchback` design, or from outside with the column ``period``, which must not
        decrease; then a period begins at its first task, unless the design's own clock gives the
        column.
    washout : float, default 0.0
        Time dropped from the beginning of every period, in the log's unit, >= 0 and below the
        period.
    level : float, default 0.95
        Confidence level.

    Returns
    -------
    Estimate

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, the log is of another design, a period mixes arms, or an arm has
        fewer than two periods.

    Warns
    -----
    UserWarning
        If an arm has fewer than ten periods: the variance is then itself poorly known.
    """
    return estimates_of(log, ["switchback"], washout=washout, level=level)[0]


def server_split(log: TaskLog, *, level: float = 0.95) -> Estimate:
    """Difference of mean response times between the groups of servers, by batch means.

    Parameters
    ----------
    log : TaskLog
        Of a `ServerSplit` design.
    level : float, default 0.95
        Confidence level.

    Returns
    -------
    Estimate
        Of the effect in two smaller systems, which differs from the global effect however long the
        log is.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, the log is of another design, or an arm is empty.
    """
    return estimates_of(log, ["server_split"], level=level)[0]


def estimate(
    log: TaskLog,
    methods: Sequence[str] | None = None,
    horizon: int | None = None,
    normalise: str = "group_means",
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    level: float = 0.95,
    washout: float = 0.0,
) -> pd.DataFrame:
    """Estimate the effect by several methods at once; what they share is computed once.

    Parameters
    ----------
    log : TaskLog
        The experiment.
    methods : sequence of str, optional
        Of ``"naive"``, ``"dq_response"``, ``"dq_queue"``, ``"dq_mixed"``, ``"switchback"``,
        ``"server_split"``. By default every method that the log's design admits. A log from outside
        counts as Bernoulli, or as a switchback if it has the column ``period``.
    horizon, normalise, queue, arrival_rate, level, washout
        As for the methods; a method ignores what it has no use for.

    Returns
    -------
    DataFrame
        A row a method, with the columns ``method, value, standard_error, low, high, horizon,
        n_used, alpha, normalise, queue, arrival_rate``; missing where they do not apply.

    Raises
    ------
    TypeError, ValueError
        As for the methods.

    Warns
    -----
    UserWarning
        As `switchback`.
    """
    return _frame(
        estimates_of(
            log,
            methods,
            horizon=horizon,
            normalise=normalise,
            queue=queue,
            arrival_rate=arrival_rate,
            level=level,
            washout=washout,
        )
    )


def _frame(estimates: Sequence[Estimate]) -> pd.DataFrame:
    import pandas as pd  # here, so that importing qdq stays quick

    columns = {
        name: pd.Series([getattr(e, name) for e in estimates], dtype=dtype)
        for name, dtype in _COLUMNS.items()
    }
    return pd.DataFrame(columns)


def estimates_of(
    log: TaskLog,
    methods: Sequence[str] | None,
    *,
    horizon: int | None = None,
    normalise: str = "group_means",
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    level: float = 0.95,
    washout: float = 0.0,
) -> list[Estimate]:
    """Check all arguments, then run each method, the windows once for all."""
    if not isinstance(log, TaskLog):
        raise TypeError(f"log is a {type(log).__name__}: it must be a TaskLog")
    level = _check_level(level)
    check_choice("normalise", normalise, NORMALISATIONS)
    check_choice("queue", queue, QUEUES)
    check_rate(arrival_rate)
    if horizon is not None:
        horizon = validation.integer("horizon", horizon, "a number of arrivals >= 1", at_least=1)
    washout = validation.number("washout", washout, "a time >= 0", at_least=0.0)
    chosen = _check_methods(log, methods)

    windows = None
    if any(name in _DQ for name in chosen):
        if "dq_mixed" in chosen and queue == "waiting":
            _refuse_unequal_rates(log)
        with_queue = any(name in _DQ[1:] for name in chosen)
        windows = _windows(log, horizon, normalise, queue if with_queue else None, arrival_rate)
    results = []
    for name in chosen:
        if name in _DQ:
            assert windows is not None
            results.append(_difference(name, windows, level))
        elif name == "switchback":
            results.append(_switchback(log, washout, level))
        else:
            results.append(_difference_of_means(name, log, level))
    return results


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def _check_level(level: float) -> float:
    return validation.number("level", level, "strictly between 0 and 1", above=0.0, below=1.0)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if not (isinstance(value, str) and value in choices):
        raise validation.refuse(name, value, "one of " + ", ".join(map(repr, choices)))


def check_rate(arrival_rate: object) -> None:
    """Refuse an arrival rate that is of none of the kinds that the DQ methods take."""
    if arrival_rate is None or callable(arrival_rate):
        return
    right = "a total arrival rate > 0, a function of time, or one of " + ", ".join(map(repr, RATES))
    if isinstance(arrival_rate, str):
        if arrival_rate not in RATES:
            raise validation.refuse("arrival_rate", arrival_rate, right)
    else:
        validation.number("arrival_rate", arrival_rate, right, above=0.0)


def _admitted(log: TaskLog) -> tuple[str, ...]:
    """Return the methods that the log's design admits."""
    if log.design is None:
        return METHODS_OF[Bernoulli if log.period is None else Switchback]
    return METHODS_OF[type(log.design)]


def _check_methods(log: TaskLog, methods: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(methods, str):
        raise TypeError(
            f"methods={methods!r} is one name: methods must be a list of names, [{methods!r}]"
        )
    if methods is not None and not isinstance(methods, Iterable):
        raise TypeError(f"methods={methods!r} is not a list of names, or None")
    methods = None if methods is None else list(methods)
    admitted = _admitted(log)
    for name in () if methods is None else methods:
        check_choice("methods", name, METHODS)
    chosen = admitted if methods is None else tuple(methods)
    origin = "from outside" if log.design is None else f"of design {log.design!r}"
    if log.design is None and log.period is not None:
        origin += " with the column period, a switchback"
    use = (
        f"use {' or '.join(admitted)}"
        if admitted
        else "it holds one arm only, and no method applies"
    )
    for name in chosen:
        if name not in admitted:
            needed = next(design.__name__ for design, names in METHODS_OF.items() if name in names)
            raise ValueError(
                f"{name} needs a log of design {needed}, and this one is {origin}: {use}"
            )
    if not chosen:
        if admitted:
            raise ValueError(
                f"methods={methods!r} is empty: give names out of {', '.join(admitted)}, or None"
            )
        raise ValueError(f"this log is {origin}: {use}")
    return chosen


def _refuse_unequal_rates(log: TaskLog) -> None:
    if log.scenario is not None and np.ptp(log.scenario.rates) > 0.0:
        raise ValueError(
            "queue='waiting' is not allowed in dq_mixed when service rates differ: the effect on "
            "waiting then is not the effect on the response; use another queue, or dq_queue alone"
        )


# --------------------------------------------------------------------------------------------------
# Differences of means
# --------------------------------------------------------------------------------------------------


def _difference_of_means(method: str, log: TaskLog, level: float) -> Estimate:
    if log.n_tasks - log.first_counted < 2:
        raise ValueError(f"{method} needs at least two counted tasks, and the log has only one")
    edges = inference.batch_edges(log.first_counted, log.n_tasks)
    counts, sums = kernels.batch_sums(log.arrival, log.departure, log.treated, edges)
    for arm, count in zip(("control", "treated"), counts.sum(axis=0), strict=True):
        if count == 0:
            raise ValueError(
                f"none of the {counts.sum()} counted tasks is {arm}: {method} needs both arms"
            )
    contrast = inference.batch_means(counts, sums)
    return _from_contrast(method, contrast, int(counts.sum()), level)


def _switchback(log: TaskLog, washout: float, level: float) -> Estimate:
    period = log.period
    if period is None:
        raise ValueError(
            "switchback needs the column period, the number of the period of each task"
        )
    row = int(np.argmax(np.diff(period, prepend=period[0]) < 0))
    if row > 0:
        raise ValueError(
            f"switchback needs periods numbered in order of time, and task {row} is of period "
            f"{period[row]} after one of period {period[row - 1]}"
        )
    length = None
    if log.design is not None:
        assert isinstance(log.design, Switchback)
        length = log.design.period
        if washout >= length:
            raise validation.refuse("washout", washout, f"below the period, {length:g}")
    # A log from outside may count time and periods from another start than its design's.
    if length is not None and np.array_equal(np.floor(log.arrival / length), period):
        begin = length * period
    else:
        _, first, number = np.unique(period, return_index=True, return_inverse=True)
        begin = log.arrival[first][number]
    kept = period < period.max()
    kept[: log.first_counted] = False
    if washout > 0.0:
        kept &= log.arrival - begin >= washout

    names, number = np.unique(period[kept], return_inverse=True)
    cell = 2 * number + log.treated[kept]
    counts = np.bincount(cell, minlength=2 * names.size).reshape(-1, 2)
    responses = np.bincount(cell, weights=log.response_time[kept], minlength=2 * names.size)
    sums = responses.astype(np.float64).reshape(-1, 2)
    both = np.flatnonzero(counts.all(axis=1))
    if both.size:
        raise ValueError(
            f"period {names[both[0]]} holds tasks of both arms: in a switchback each holds one"
        )
    control, treated = np.count_nonzero(counts, axis=0)
    found = f"{control} control and {treated} treated whole periods after a washout of {washout:g}"
    if min(control, treated) < 2:
        raise ValueError(
            f"switchback needs at least 2 periods of each arm, and the log has {found}"
        )
    if min(control, treated) < FEW_PERIODS:
        warnings.warn(
            f"the standard error of switchback is rough, with {found}: {FEW_PERIODS} are advised",
            stacklevel=4,
        )
    return _from_contrast("switchback", inference.clustered(counts, sums), int(counts.sum()), level)


def _from_contrast(
    method: str, contrast: inference.Contrast, n_used: int, level: float
) -> Estimate:
    return Estimate(
        method=method,
        value=contrast.value,
        standard_error=math.sqrt(contrast.variance),
        level=level,
        degrees_of_freedom=contrast.degrees_of_freedom,
        n_used=n_used,
    )


# --------------------------------------------------------------------------------------------------
# Differences in Q
# --------------------------------------------------------------------------------------------------


class _Windows(NamedTuple):
    """What the DQ methods share: both differences over the same windows."""

    contrast: inference.WindowContrast
    horizon: int
    n_used: int
    normalise: str
    queue: str | None
    arrival_rate: float | str | None


def _windows(
    log: TaskLog,
    horizon: int | None,
    normalise: str,
    queue: str | None,
    arrival_rate: ArrivalRate | None,
) -> _Windows:
    """Compute both differences; with `queue=None` the queue's is left at zero."""
    horizon = _resolve_horizon(log, horizon)
    propensity = None
    if normalise == "inverse_propensity":
        propensity = log.propensity
        if propensity is None:
            raise ValueError(
                "normalise='inverse_propensity' needs the known probability of treatment, and the "
                "log's propensity is None: give it to the log, or use 'group_means' (which is what "
                "estimating it by the treated share comes to)"
            )
        if not 0.0 < propensity < 1.0:
            raise ValueError(
                f"normalise='inverse_propensity' needs a propensity strictly between 0 and 1, not "
                f"the log's {propensity!r}"
            )
    if queue is None:
        costs = _Costs(np.zeros(log.n_tasks, dtype=np.int64), 1.0, False, None)
    else:
        costs = _queue_costs(log, horizon, queue, arrival_rate)
    moments = kernels.window_moments(
        log.arrival,
        log.departure,
        costs.of_arrival,
        log.treated,
        log.first_counted,
        horizon,
        costs.scale,
        costs.by_duration,
    )
    for arm, count in zip(("control", "treated"), moments[:, 0], strict=True):
        if count < 2:
            raise ValueError(
                f"only {count:g} of the {moments[:, 0].sum():g} windows of horizon {horizon} begin "
                f"with a {arm} task: at least 2 are needed"
            )
    return _Windows(
        inference.difference_in_sums(moments, propensity),
        horizon,
        int(moments[:, 0].sum()),
        normalise,
        queue,
        costs.arrival_rate,
    )


def _difference(method: str, windows: _Windows, level: float) -> Estimate:
    """Turn the shared differences into the estimate of one DQ method."""
    value_w, value_q, variance_w, variance_q, covariance = windows.contrast
    uses: dict[str, Any] = {}
    if method != "dq_response":
        uses |= {"queue": windows.queue, "arrival_rate": windows.arrival_rate}
        uses |= {"variance_queue": variance_q}
    if method != "dq_queue":
        uses |= {"variance_response": variance_w}
    if method == "dq_response":
        value, variance = value_w, variance_w
    elif method == "dq_queue":
        value, variance = value_q, variance_q
    else:
        alpha = inference.best_weight(variance_w, variance_q, covariance)
        value = alpha * value_w + (1.0 - alpha) * value_q
        variance = inference.mixture_variance(alpha, variance_w, variance_q, covariance)
        uses |= {"alpha": alpha, "covariance": covariance}
    return Estimate(
        method=method,
        value=value,
        standard_error=math.sqrt(variance),
        level=level,
        degrees_of_freedom=math.inf,
        n_used=windows.n_used,
        horizon=windows.horizon,
        normalise=windows.normalise,
        **uses,
    )


def _resolve_horizon(log: TaskLog, horizon: int | None) -> int:
    counted = log.n_tasks - log.first_counted
    if horizon is not None:
        if horizon >= counted:
            raise validation.refuse(
                "horizon", horizon, f"below the number of counted tasks, {counted}"
            )
        return horizon
    if log.scenario is not None:
        horizon = log.scenario.default_horizon
    elif log.service_time is not None:
        horizon = math.floor(30.0 * _estimated_rate(log) * float(np.mean(log.service_time)) + 1e-9)
    else:
        raise ValueError(
            "horizon=None needs a scenario or the column service_time, and the log has neither: "
            "give the number of arrivals that a window spans, say those of 30 mean service times"
        )
    if not 1 <= horizon < counted:
        raise ValueError(
            f"horizon=None means {horizon} for this log, and it must be at least 1 and below the "
            f"number of counted tasks, {counted}: give a horizon"
        )
    return horizon


class _Costs(NamedTuple):
    """The queue's cost at each arrival; a window's cost is ``scale`` times a sum of them."""

    of_arrival: NDArray[np.int64] | NDArray[np.float64]
    scale: float
    by_duration: bool  # the sum is also multiplied by the time that the window spans
    arrival_rate: float | str | None


def _queue_costs(
    log: TaskLog, horizon: int, queue: str, arrival_rate: ArrivalRate | None
) -> _Costs:
    if queue == "time_average":
        leaves_at = kernels.next_arrival(log.arrival, log.departure)
        carried = np.ascontiguousarray(log.carried_over[:, 2])
        carried_leaves_at = np.searchsorted(log.arrival, carried)
        found = kernels.tasks_in_system(leaves_at, carried_leaves_at)
        area = kernels.area_between_arrivals(
            log.arrival, log.departure, leaves_at, carried, carried_leaves_at, found
        )
        return _Costs(area, 1.0, False, None)
    if queue == "waiting":
        found = _tasks_found(log, *_start_of_service(log))
    elif log.in_system is not None:
        found = log.in_system
    else:
        found = _tasks_found(log, log.departure, log.carried_over[:, 2])
    if queue == "including_self":
        found = found + 1

    if arrival_rate is None:
        periodic = log.scenario is not None and isinstance(log.scenario.arrivals, Periodic)
        arrival_rate = "scenario" if periodic else "estimated"
    if arrival_rate == "estimated":
        return _Costs(found, 1.0 / _estimated_rate(log), False, "estimated")
    if arrival_rate == "window":
        return _Costs(found, 1.0 / horizon, True, "window")
    if arrival_rate == "scenario":
        return _Costs(found / _scenario_rate(log), 1.0, False, "scenario")
    if callable(arrival_rate):
        return _Costs(found / _called_rate(arrival_rate, log.arrival), 1.0, False, "function")
    rate = float(arrival_rate)  # check_rate has left only numbers
    return _Costs(found, 1.0 / rate, False, rate)


def _tasks_found(
    log: TaskLog, end: NDArray[np.float64], carried_end: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Count, at each arrival, the earlier tasks whose `end` lies after it."""
    found: NDArray[np.int64] = kernels.tasks_in_system(
        kernels.next_arrival(log.arrival, end), np.searchsorted(log.arrival, carried_end)
    )
    return found


def _start_of_service(log: TaskLog) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the start of service of the log's tasks, and of those carried over."""
    carried_start = log.carried_over[:, 1]
    if log.service_time is not None:
        start = log.departure - log.service_time
        # A task served at once starts at its arrival: rounding must not make it wait.
        rounding = 4.0 * np.finfo(np.float64).eps * np.abs(log.departure)
        return np.where(start - log.arrival <= rounding, log.arrival, start), carried_start
    if log.server is None:
        raise ValueError(
            "queue='waiting' needs the start of service, and the log has neither the column "
            "service_time nor server"
        )
    servers = int(log.server.max()) + 1
    if log.carried_over.size:
        servers = max(servers, int(log.carried_over[:, 0].max()) + 1)
    free = np.full(servers, -np.inf)
    np.maximum.at(free, log.carried_over[:, 0].astype(np.int64), log.carried_over[:, 2])
    delay = 0.0 if log.scenario is None else log.scenario.dispatch_delay
    start = kernels.start_of_service(log.arrival, log.departure, log.server, delay, free)
    wrong = np.flatnonzero(start > log.departure)
    if wrong.size:
        k = wrong[0]
        raise ValueError(
            f"queue='waiting' without service times needs FCFS servers, and task {k} leaves server "
            f"{log.server[k]} at {log.departure[k]:g}, before it could start at {start[k]:g}"
        )
    return start, carried_start


# --------------------------------------------------------------------------------------------------
# Arrival rates
# --------------------------------------------------------------------------------------------------


def _estimated_rate(log: TaskLog) -> float:
    span = float(log.arrival[-1] - log.arrival[0])
    if span <= 0.0:
        raise ValueError("the arrival rate can't be estimated: all arrivals are at the same time")
    return (log.n_tasks - 1) / span


def _scenario_rate(log: TaskLog) -> NDArray[np.float64]:
    if log.scenario is None:
        raise ValueError(
            "arrival_rate='scenario' needs a log with a scenario, and this one has none"
        )
    if isinstance(log.scenario.arrivals, ArrivalTrace):
        raise ValueError(
            "arrival_rate='scenario' needs arrivals with a rate, and an ArrivalTrace has none: "
            "use 'estimated', 'window' or queue='time_average'"
        )
    rate = log.scenario.n_servers * log.scenario.arrivals.rate_at(log.arrival)
    return _check_rates("arrival_rate='scenario'", rate, log.arrival)


def _called_rate(
    function: Callable[[NDArray[np.float64]], NDArray[np.float64] | float],
    time: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Evaluate a user's rate at all arrivals, with one call if it takes arrays."""
    try:
        answer = np.asarray(function(time), dtype=np.float64)
        vectorised = answer.shape in ((), time.shape)
    except (TypeError, ValueError):
        vectorised = False
    if not vectorised:
        answer = np.array([function(t) for t in time], dtype=np.float64)
        if answer.shape != time.shape:
            raise ValueError(
                f"arrival_rate(t) gives shape {answer.shape[1:]} for one time: it must be a number"
            )
    return _check_rates("arrival_rate(t)", np.broadcast_to(answer, time.shape), time)


def _check_rates(
    name: str, rate: NDArray[np.float64], time: NDArray[np.float64]
) -> NDArray[np.float64]:
    bad = np.flatnonzero(~(np.isfinite(rate) & (rate > 0.0)))
    if bad.size:
        k = bad[0]
        raise ValueError(
            f"{name} gives {rate[k]:g} at time {time[k]:g}: a rate must be positive and finite"
        )
    return rate
