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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qdq import inference, kernels, validation
from qdq.designs import AllControl, AllTreatment, Bernoulli, Design, ServerSplit, Switchback
from qdq.inference import ConfidenceInterval
from qdq.scenario import ArrivalTrace, Periodic, Scenario
from qdq.streaming import CHUNK, Chunk, Sums, Window, start_by_service_time
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
        return frame_of([self])

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
    return frame_of(
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


def frame_of(estimates: Sequence[Estimate]) -> pd.DataFrame:
    """Return a frame of one row an estimate, with the columns of `estimate`."""
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

    if any(name in _DQ for name in chosen):
        if "dq_mixed" in chosen and queue == "waiting":
            _refuse_unequal_rates(log)
        horizon = _resolve_horizon(log, horizon)
        if normalise == "inverse_propensity":
            _check_propensity(log.propensity)
    call = Call(chosen, horizon, normalise, queue, arrival_rate, washout)
    sums = sums_of([call], log.n_tasks, log.first_counted, log.carried_over, log.scenario)
    for chunk in _chunks(log, call):
        sums.add(chunk)
    return estimates_from(sums, call, log.scenario, log.propensity, level)


class Call(NamedTuple):
    """Methods that are estimated in one go, and what has been checked of their options."""

    methods: tuple[str, ...]
    horizon: int | None = None
    normalise: str = "group_means"
    queue: str = "in_system"
    arrival_rate: ArrivalRate | None = None
    washout: float = 0.0

    def rate_of(self, scenario: Scenario | None) -> ArrivalRate | None:
        """Return the arrival rate meant, None if the queue's sum needs none."""
        if self.queue == "time_average" or not self._uses_queue:
            return None
        if self.arrival_rate is None:
            periodic = scenario is not None and isinstance(scenario.arrivals, Periodic)
            return "scenario" if periodic else "estimated"
        return self.arrival_rate

    def window(self, scenario: Scenario | None) -> Window | None:
        """Return the truncated sums that the call needs, if any."""
        if not any(name in _DQ for name in self.methods):
            return None
        assert self.horizon is not None
        rate = self.rate_of(scenario)
        return Window(
            self.horizon,
            self.queue if self._uses_queue else None,
            rate if callable(rate) or rate == "scenario" else None,
            rate == "window",
        )

    @property
    def _uses_queue(self) -> bool:
        return any(name in _DQ[1:] for name in self.methods)


def sums_of(
    calls: Sequence[Call],
    n_tasks: int,
    first: int,
    carried_over: NDArray[np.float64],
    scenario: Scenario | None,
) -> Sums:
    """Return what takes, of an experiment's tasks, the sums that the calls need.

    `carried_over` holds server, start of service and departure of the tasks there before.
    """
    means = {"naive", "server_split"}
    batches = any(name in means for call in calls for name in call.methods)
    if batches and n_tasks - first < 2:
        method = next(name for call in calls for name in call.methods if name in means)
        raise ValueError(f"{method} needs at least two counted tasks, and the log has only one")
    windows = [window for call in calls if (window := call.window(scenario)) is not None]
    until, start = carried_over[:, 2].copy(), carried_over[:, 1].copy()

    def rates_at(rate: Any, time: NDArray[np.float64]) -> NDArray[np.float64]:
        return _scenario_rate(scenario, time) if rate == "scenario" else _called_rate(rate, time)

    return Sums(n_tasks, first, windows, batches, until, start, rates_at)


def estimates_from(
    sums: Sums,
    call: Call,
    scenario: Scenario | None,
    propensity: float | None,
    level: float,
) -> list[Estimate]:
    """Return the estimate of each method of a call, from the sums over all tasks."""
    windows = None
    if call.window(scenario) is not None:
        windows = _windows(sums, call, scenario, propensity)
    results = []
    for name in call.methods:
        if name in _DQ:
            assert windows is not None
            results.append(_difference(name, windows, level))
        elif name == "switchback":
            results.append(_switchback(sums, call.washout, level))
        else:
            results.append(_difference_of_means(name, sums, level))
    return results


def _chunks(log: TaskLog, call: Call) -> Iterator[Chunk]:
    """Yield the tasks of a log, with the columns that a call needs."""
    window = call.window(log.scenario)
    if window is not None and window.rate == "scenario":
        _check_has_rate(log.scenario)
    waiting = window is not None and window.queue == "waiting"
    start = _start_of_service(log) if waiting else None
    period = kept = None
    if "switchback" in call.methods:
        period, kept = _kept_of_periods(log, call.washout)
    for begin in range(0, log.n_tasks, CHUNK):
        rows = slice(begin, begin + CHUNK)
        # Copied: the log's arrays are read-only, and kernels would be compiled once more for them.
        yield Chunk(
            base=0.0,
            arrival=log.arrival[rows].copy(),
            departure=log.departure[rows].copy(),
            treated=log.treated[rows].copy(),
            start=None if start is None else start[rows],
            in_system=None if log.in_system is None else log.in_system[rows],
            period=None if period is None else period[rows].copy(),
            kept=None if kept is None else kept[rows],
        )


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


def _difference_of_means(method: str, sums: Sums, level: float) -> Estimate:
    counts = sums.batch_counts
    for arm, count in zip(("control", "treated"), counts.sum(axis=0), strict=True):
        if count == 0:
            raise ValueError(
                f"none of the {counts.sum()} counted tasks is {arm}: {method} needs both arms"
            )
    contrast = inference.batch_means(counts, sums.batch_sums)
    return _from_contrast(method, contrast, int(counts.sum()), level)


def _kept_of_periods(log: TaskLog, washout: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the period of each task of a switchback, and which count after the wash-out."""
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
    kept = log.arrival - begin >= washout
    kept[: log.first_counted] = False
    return period, kept


def _switchback(sums: Sums, washout: float, level: float) -> Estimate:
    control, treated = (int(count) for count in sums.period_moments[:, 0])
    found = f"{control} control and {treated} treated whole periods after a washout of {washout:g}"
    if min(control, treated) < 2:
        raise ValueError(
            f"switchback needs at least 2 periods of each arm, and the log has {found}"
        )
    if min(control, treated) < FEW_PERIODS:
        warnings.warn(
            f"the standard error of switchback is rough, with {found}: {FEW_PERIODS} are advised",
            stacklevel=5,
        )
    contrast = inference.clustered(sums.period_moments)
    return _from_contrast("switchback", contrast, int(sums.period_moments[:, 1].sum()), level)


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


def _check_propensity(propensity: float | None) -> None:
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


def _windows(
    sums: Sums, call: Call, scenario: Scenario | None, propensity: float | None
) -> _Windows:
    """Compute both differences; without a queue its own is left at zero."""
    window = call.window(scenario)
    rate = call.rate_of(scenario)
    assert window is not None
    scale = 1.0
    if rate == "estimated":
        scale = 1.0 / _estimated_rate(sums.n_seen, sums.first_arrival, sums.last_arrival)
    elif rate == "window":
        scale = 1.0 / window.horizon
    elif rate is not None and window.rate is None:
        assert isinstance(rate, (int, float, np.number))  # check_rate has left only numbers
        scale = 1.0 / float(rate)
    moments = sums.window_moments(window, scale)
    for arm, count in zip(("control", "treated"), moments[:, 0], strict=True):
        if count < 2:
            raise ValueError(
                f"only {count:g} of the {moments[:, 0].sum():g} windows of horizon "
                f"{window.horizon} begin with a {arm} task: at least 2 are needed"
            )
    weighted = call.normalise == "inverse_propensity"
    said = "function" if callable(rate) else rate
    return _Windows(
        inference.difference_in_sums(moments, propensity if weighted else None),
        window.horizon,
        int(moments[:, 0].sum()),
        call.normalise,
        window.queue,
        said if said is None or isinstance(said, str) else float(said),
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
        rate = _estimated_rate(log.n_tasks, log.arrival[0], log.arrival[-1])
        horizon = math.floor(30.0 * rate * float(np.mean(log.service_time)) + 1e-9)
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


def _start_of_service(log: TaskLog) -> NDArray[np.float64]:
    """Return the start of service of the log's tasks."""
    if log.service_time is not None:
        return start_by_service_time(log.arrival, log.departure, log.service_time)
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
    start: NDArray[np.float64] = kernels.start_of_service(
        log.arrival, log.departure, log.server, delay, free
    )
    wrong = np.flatnonzero(start > log.departure)
    if wrong.size:
        k = wrong[0]
        raise ValueError(
            f"queue='waiting' without service times needs FCFS servers, and task {k} leaves server "
            f"{log.server[k]} at {log.departure[k]:g}, before it could start at {start[k]:g}"
        )
    return start


# --------------------------------------------------------------------------------------------------
# Arrival rates
# --------------------------------------------------------------------------------------------------


def _estimated_rate(n_tasks: int, first: float, last: float) -> float:
    if not last > first:
        raise ValueError("the arrival rate can't be estimated: all arrivals are at the same time")
    return (n_tasks - 1) / (last - first)


def _check_has_rate(scenario: Scenario | None) -> None:
    if scenario is None:
        raise ValueError(
            "arrival_rate='scenario' needs a log with a scenario, and this one has none"
        )
    if isinstance(scenario.arrivals, ArrivalTrace):
        raise ValueError(
            "arrival_rate='scenario' needs arrivals with a rate, and an ArrivalTrace has none: "
            "use 'estimated', 'window' or queue='time_average'"
        )


def _scenario_rate(scenario: Scenario | None, time: NDArray[np.float64]) -> NDArray[np.float64]:
    assert scenario is not None
    assert not isinstance(scenario.arrivals, ArrivalTrace)
    rate = scenario.n_servers * scenario.arrivals.rate_at(time)
    return _check_rates("arrival_rate='scenario'", rate, time)


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
