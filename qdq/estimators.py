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

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qdq import horizon as horizons
from qdq import inference, kernels, trust, validation
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
VARIANCES = ("score", "hac", "batch_means", "jackknife")

_DQ = ("dq_response", "dq_queue", "dq_mixed")
METHODS_OF: dict[type[Design], tuple[str, ...]] = {
    Bernoulli: ("naive", *_DQ),
    Switchback: ("switchback",),
    ServerSplit: ("server_split",),
    AllControl: (),
    AllTreatment: (),
}
VARIANCE_OF = {
    "naive": "hac",
    **dict.fromkeys(_DQ, "hac"),
    "switchback": "hac",
    "server_split": "hac",
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

# The longest horizon that a rule considers, in default ones of the scenario.
MOST_DEFAULTS = 64


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
    variance: str
    """How the standard error was found, as in `estimate`."""
    horizon: int | None = None
    """L, the number of arrivals that a window spans."""
    rule: str | None = None
    """What chose the horizon, "rmse" or "coverage"; None if it was given or is the default."""
    memory: horizons.Memory | None = dataclasses.field(default=None, compare=False)
    """How long the log's queues remember, found when it is asked for."""
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

    @property
    def truncation(self) -> float | None:
        """Share of the response to a decision that is thought to come after the horizon.

        Read off how long responses stay correlated, see `horizon.Decay`; None for estimates that
        were made without a log at hand, such as online ones.
        """
        if self.memory is None or self.horizon is None:
            return None
        return float(self.memory.decay.remaining_at(self.horizon))

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
        if self.rule is not None:
            said[1] += f" by the rule {self.rule!r}"
        if self.truncation is not None:
            said[1] += f", about {_percent(self.truncation)} of the response beyond it"
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


def _percent(share: float) -> str:
    if share < 0.001:
        return "less than 0.1 %"
    return f"{100.0 * share:.{1 if share < 0.1 else 0}f} %"


def naive(log: TaskLog, *, level: float = 0.95, variance: str | None = None) -> Estimate:
    """Difference of the arms' mean response times.

    Parameters
    ----------
    log : TaskLog
        Of a Bernoulli experiment, or from outside.
    level : float, default 0.95
        Confidence level.
    variance : str, optional
        How the standard error is found, as for `estimate`.

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
    return estimates_of(log, ["naive"], level=level, variance=variance)[0]


def dq_response(
    log: TaskLog,
    *,
    horizon: int | str | None = None,
    normalise: str = "group_means",
    level: float = 0.95,
    variance: str | None = None,
) -> Estimate:
    """Difference in truncated sums of response times (wDQ).

    Parameters
    ----------
    log : TaskLog
        Of a Bernoulli experiment, or from outside.
    horizon : int or {"rmse", "coverage"}, optional
        L, the number of arrivals that a window spans, from 1 to below the number of tasks, or the
        rule that chooses it, for each method by itself: ``"rmse"`` weighs bias against variance,
        ``"coverage"`` takes the least horizon whose remaining bias is below a quarter of the
        standard error (see `horizon.choose`). By default ``floor(30 N lam)`` of the log's scenario;
        for a log from outside ``floor(30 * rate * mean service time)`` with the estimated arrival
        rate, if it has service times, else ``"coverage"``.
    normalise : {"group_means", "inverse_propensity"}, default "group_means"
        Difference of the arms' means, or mean of ``(Z/p - (1 - Z)/(1 - p)) Q`` with the log's known
        propensity p.
    level : float, default 0.95
        Confidence level.
    variance : str, optional
        How the standard error is found, as for `estimate`.

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
    return estimates_of(
        log, ["dq_response"], horizon=horizon, normalise=normalise, level=level, variance=variance
    )[0]


def dq_queue(
    log: TaskLog,
    *,
    horizon: int | str | None = None,
    normalise: str = "group_means",
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    level: float = 0.95,
    variance: str | None = None,
) -> Estimate:
    """Difference in truncated sums of the number in system (qDQ), in time by Little's law.

    Parameters
    ----------
    log, horizon, normalise, level, variance
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
        variance=variance,
    )[0]


def dq_mixed(
    log: TaskLog,
    *,
    horizon: int | str | None = None,
    normalise: str = "group_means",
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    level: float = 0.95,
    variance: str | None = None,
) -> Estimate:
    """Mixture ``alpha wDQ + (1 - alpha) qDQ`` of the smallest estimated variance.

    Parameters
    ----------
    log, horizon, normalise, level, variance
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
    covariances of the weighted scores divided by their number (inverse propensity). Standard
    errors take alpha as given, but for ``variance="jackknife"``. Where both parts have the same
    deviations to within rounding, every weight gives the same variance and alpha is 1/2.
    """
    return estimates_of(
        log,
        ["dq_mixed"],
        horizon=horizon,
        normalise=normalise,
        queue=queue,
        arrival_rate=arrival_rate,
        level=level,
        variance=variance,
    )[0]


def switchback(
    log: TaskLog, *, washout: float = 0.0, level: float = 0.95, variance: str | None = None
) -> Estimate:
    """Mean response over treated periods minus that over control periods, weighted by tasks.

    The first `washout` of every period is dropped, and so is the last period, which the end of the
    log cuts short.

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
    variance : str, optional
        How the standard error is found, as for `estimate`.

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
    return estimates_of(log, ["switchback"], washout=washout, level=level, variance=variance)[0]


def server_split(log: TaskLog, *, level: float = 0.95, variance: str | None = None) -> Estimate:
    """Difference of mean response times between the groups of servers.

    Parameters
    ----------
    log : TaskLog
        Of a `ServerSplit` design.
    level : float, default 0.95
        Confidence level.
    variance : str, optional
        How the standard error is found, as for `estimate`.

    Returns
    -------
    Estimate
        Of the effect in two smaller systems, which differs from the global effect however long the
        log is. Where the groups are known to differ, in the number of servers or in their rates,
        there is no standard error and no interval: one draw of the groups says nothing of how far
        another would be.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, the log is of another design, or an arm is empty.
    """
    return estimates_of(log, ["server_split"], level=level, variance=variance)[0]


def estimate(
    log: TaskLog,
    methods: Sequence[str] | None = None,
    horizon: int | str | None = None,
    normalise: str = "group_means",
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    level: float = 0.95,
    washout: float = 0.0,
    variance: str | None = None,
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
    variance : {"score", "hac", "batch_means", "jackknife"}, optional
        How standard errors are found. ``"score"``: as if the scores of tasks, windows or periods
        were independent, which leaves out how the state that they meet varies (see
        `inference.difference_in_sums`, `inference.clustered`). ``"hac"``, the default of every
        method: long-run variance by the slowest cosines (`inference.series`). ``"batch_means"``:
        from about 32 stretches of the log. ``"jackknife"``: by leaving out one of these after the
        other, the mixture's weight found anew each time.

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
        As `switchback`; and for what makes intervals doubtful, see `trust.doubts`.
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
            variance=variance,
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
    horizon: int | str | None = None,
    normalise: str = "group_means",
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    level: float = 0.95,
    washout: float = 0.0,
    variance: str | None = None,
) -> list[Estimate]:
    """Check all arguments, then run each method, the windows once for all."""
    if not isinstance(log, TaskLog):
        raise TypeError(f"log is a {type(log).__name__}: it must be a TaskLog")
    level = _check_level(level)
    check_variant(normalise, queue, arrival_rate, variance)
    horizon = check_horizon(horizon)
    washout = validation.number("washout", washout, "a time >= 0", at_least=0.0)
    chosen = _check_methods(log, methods)

    span: int | None = None
    rule: str | None = None
    grid: tuple[int, ...] = ()
    memory = None
    if any(name in _DQ for name in chosen):
        if queue == "waiting":
            refuse_sharing(log.scenario)
            if "dq_mixed" in chosen:
                _refuse_unequal_rates(log)
        span, rule = _resolve_horizon(log, horizon)
        if rule is not None:
            grid = horizon_grid(log.n_tasks - log.first_counted, log.scenario)
        memory = horizons.Memory(log)
        if normalise == "inverse_propensity":
            check_propensity(log.propensity)
    unequal = False
    if isinstance(log.design, ServerSplit) and log.scenario is not None:
        unequal = not log.design.equal_groups(log.scenario)
    options = (normalise, queue, arrival_rate, washout, variance, rule, grid, unequal)
    call = Call(chosen, span, *options)
    sums = sums_of([call], log.n_tasks, log.first_counted, log.carried_over, log.scenario)
    for chunk in _chunks(log, call):
        sums.add(chunk)
    results = estimates_from(sums, call, log.scenario, log.propensity, level, memory)
    for doubt in trust.doubts(log, results):
        warnings.warn(doubt, UserWarning, stacklevel=3)
    return results


class Call(NamedTuple):
    """Methods that are estimated in one go, and what has been checked of their options."""

    methods: tuple[str, ...]
    horizon: int | None = None
    normalise: str = "group_means"
    queue: str = "in_system"
    arrival_rate: ArrivalRate | None = None
    washout: float = 0.0
    variance: str | None = None
    rule: str | None = None
    """What chooses among the horizons of the grid, if anything."""
    grid: tuple[int, ...] = ()
    unequal_groups: bool = False
    """Whether the arms of a server split have servers that differ."""

    def rate_of(self, scenario: Scenario | None) -> ArrivalRate | None:
        """Return the arrival rate meant, None if the queue's sum needs none."""
        if self.queue == "time_average" or not self._uses_queue:
            return None
        if self.arrival_rate is None:
            periodic = scenario is not None and isinstance(scenario.arrivals, Periodic)
            return "scenario" if periodic else "estimated"
        return self.arrival_rate

    def windows(self, scenario: Scenario | None) -> list[Window]:
        """Return the truncated sums that the call needs: of its horizon, or of each of the grid."""
        if not any(name in _DQ for name in self.methods):
            return []
        rate = self.rate_of(scenario)
        spans = self.grid if self.rule is not None else (self.horizon,)
        return [
            Window(
                span,
                self.queue if self._uses_queue else None,
                rate if callable(rate) or rate == "scenario" else None,
                rate == "window",
            )
            for span in spans
            if span is not None
        ]

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
    means = any(name in ("naive", "server_split") for call in calls for name in call.methods)
    windows = [window for call in calls for window in call.windows(scenario)]
    until, start = carried_over[:, 2].copy(), carried_over[:, 1].copy()

    def rates_at(rate: Any, time: NDArray[np.float64]) -> NDArray[np.float64]:
        return _scenario_rate(scenario, time) if rate == "scenario" else _called_rate(rate, time)

    return Sums(first, windows, means, until, start, rates_at, n_tasks)


def estimates_from(
    sums: Sums,
    call: Call,
    scenario: Scenario | None,
    propensity: float | None,
    level: float,
    memory: horizons.Memory | None = None,
) -> list[Estimate]:
    """Return the estimate of each method of a call, from the sums over all tasks."""
    windows = [
        _windows(sums, call, window, scenario, propensity) for window in call.windows(scenario)
    ]
    remaining = _remaining(windows) if call.rule is not None else None
    results = []
    for name in call.methods:
        variance = call.variance or VARIANCE_OF[name]
        if name in _DQ:
            chosen = windows[0]
            if remaining is not None:
                assert call.rule is not None
                chosen = _choose(name, windows, remaining, call.rule)
            results.append(_difference(name, chosen, variance, level, call.rule, memory))
        elif name == "switchback":
            results.append(_switchback(sums, call.washout, variance, level))
        else:
            result = _difference_of_means(name, sums, variance, level)
            if call.unequal_groups and name == "server_split":
                # What one draw of the groups says nothing of.
                result = dataclasses.replace(result, standard_error=math.nan)
            results.append(result)
    return results


def _chunks(log: TaskLog, call: Call) -> Iterator[Chunk]:
    """Yield the tasks of a log, with the columns that a call needs."""
    windows = call.windows(log.scenario)
    if any(window.rate == "scenario" for window in windows):
        _check_has_rate(log.scenario)
    waiting = any(window.queue == "waiting" for window in windows)
    start = _start_of_service(log) if waiting else None
    period = kept = None
    if "switchback" in call.methods:
        period, kept = kept_of_periods(log, call.washout)
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


def check_variant(normalise: object, queue: object, arrival_rate: object, variance: object) -> None:
    """Refuse options that no method takes."""
    check_choice("normalise", normalise, NORMALISATIONS)
    check_choice("queue", queue, QUEUES)
    check_rate(arrival_rate)
    if variance is not None:
        check_choice("variance", variance, VARIANCES)


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


def refuse_sharing(scenario: Scenario | None) -> None:
    """Refuse ``queue="waiting"`` where servers are known to share, so that no task waits."""
    if scenario is not None and scenario.discipline != "fcfs":
        raise ValueError(
            f"queue='waiting' is not allowed under discipline={scenario.discipline!r}, where all "
            "tasks at a server are served at once and none waits: use another queue"
        )


def _refuse_unequal_rates(log: TaskLog) -> None:
    if log.scenario is not None and np.ptp(log.scenario.rates) > 0.0:
        raise ValueError(
            "queue='waiting' is not allowed in dq_mixed when service rates differ: the effect on "
            "waiting then is not the effect on the response; use another queue, or dq_queue alone"
        )


# --------------------------------------------------------------------------------------------------
# Differences of means
# --------------------------------------------------------------------------------------------------


def _difference_of_means(method: str, sums: Sums, variance: str, level: float) -> Estimate:
    blocks = sums.means()
    count = blocks[:, :, 0].sum(axis=0)
    for arm, number in zip(("control", "treated"), count, strict=True):
        if number == 0.0:
            raise ValueError(
                f"none of the {count.sum():g} counted tasks is {arm}: {method} needs both arms"
            )
    score = inference.difference_of_means(blocks.sum(axis=0))
    return _with_variance(method, score, blocks, variance, level)


def _with_variance(
    method: str,
    score: inference.Contrast,
    blocks: NDArray[np.float64],
    variance: str,
    level: float,
) -> Estimate:
    """Turn a difference of means into an estimate, `score` holding its variance by scores."""

    def influence(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
        return inference.influence(blocks[:, :, 0], blocks[:, :, 1:2])[:, 0]

    def estimate(sums: NDArray[np.float64]) -> float:
        return float(sums[1, 1] / sums[1, 0] - sums[0, 1] / sums[0, 0])

    by_score = inference.Spread(score.variance, score.degrees_of_freedom)
    spread = inference.spread(variance, by_score, blocks, influence, estimate)
    return Estimate(
        method=method,
        value=score.value,
        standard_error=math.sqrt(spread.variance),
        level=level,
        degrees_of_freedom=spread.degrees_of_freedom,
        n_used=int(blocks[:, :, 0].sum()),
        variance=variance,
    )


def kept_of_periods(log: TaskLog, washout: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
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


def _switchback(sums: Sums, washout: float, variance: str, level: float) -> Estimate:
    moments, blocks = sums.periods()
    control, treated = (int(count) for count in moments[:, 0])
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
    return _with_variance("switchback", inference.clustered(moments), blocks, variance, level)


# --------------------------------------------------------------------------------------------------
# Differences in Q
# --------------------------------------------------------------------------------------------------


class _Windows(NamedTuple):
    """What the DQ methods share: both differences over the same windows."""

    contrast: inference.WindowContrast
    blocks: NDArray[np.float64]
    """(B, 2, 6), sums of each block and arm, as `Sums.windows` returns them."""
    origin: NDArray[np.float64]
    """What was taken off response and queue there."""
    propensity: float | None
    """For inverse propensity."""
    horizon: int
    normalise: str
    queue: str | None
    arrival_rate: float | str | None


def check_propensity(propensity: float | None) -> None:
    """Refuse a log's propensity that inverse weights cannot be made of."""
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


def _scale_of_queue(sums: Sums, window: Window, rate: ArrivalRate | None) -> float:
    """Return what turns the queue's sums into times, for what is not divided task by task."""
    if rate == "estimated":
        return 1.0 / _estimated_rate(sums.n_seen, sums.first_arrival, sums.last_arrival)
    if rate == "window":
        return 1.0 / window.horizon
    if rate is not None and window.rate is None:
        assert isinstance(rate, (int, float, np.number))  # check_rate has left only numbers
        return 1.0 / float(rate)
    return 1.0


def truncated_sums(log: TaskLog, call: Call) -> NDArray[np.float64]:
    """Return both truncated sums of every window of a log, as the DQ methods compare them.

    Parameters
    ----------
    log : TaskLog
    call : Call
        With a horizon, and a DQ method.

    Returns
    -------
    ndarray of float64, shape (windows, 2)
        Response and queue, zero if the call has no use for it, from the first counted task on.
    """
    (window,), rate = call.windows(log.scenario), call.rate_of(log.scenario)
    sums = sums_of([call], log.n_tasks, log.first_counted, log.carried_over, log.scenario)
    cost = np.zeros(log.n_tasks)
    before = float(log.arrival[0])
    begin = 0
    for chunk in _chunks(log, call):
        for values in sums.costs(chunk, before).values():
            cost[begin : begin + values.size] = values
        begin += chunk.arrival.size
        before = float(chunk.arrival[-1])
    sums.n_seen, sums.first_arrival, sums.last_arrival = (
        log.n_tasks,
        log.arrival[0],
        log.arrival[-1],
    )
    first, horizon = log.first_counted, window.horizon
    response, queue = (
        np.concatenate(([0.0], np.cumsum(values))) for values in (log.response_time, cost)
    )
    q_sum = (queue[horizon + 1 :] - queue[1:-horizon]) * _scale_of_queue(sums, window, rate)
    if window.by_duration:
        q_sum *= log.arrival[horizon:] - log.arrival[:-horizon]
    w_sum = response[horizon:-1] - response[: -horizon - 1]
    return np.column_stack((w_sum, q_sum))[first:]


def _windows(
    sums: Sums,
    call: Call,
    window: Window,
    scenario: Scenario | None,
    propensity: float | None,
) -> _Windows:
    """Compute both differences; without a queue its own is left at zero."""
    rate = call.rate_of(scenario)
    scale = _scale_of_queue(sums, window, rate)
    blocks, origin = sums.windows(window, scale), sums.origin(window, scale)
    total = blocks.sum(axis=0)
    for arm, count in zip(("control", "treated"), total[:, 0], strict=True):
        if count < 2:
            raise ValueError(
                f"only {count:g} of the {total[:, 0].sum():g} windows of horizon "
                f"{window.horizon} begin with a {arm} task: at least 2 are needed"
            )
    known = propensity if call.normalise == "inverse_propensity" else None
    said = "function" if callable(rate) else rate
    return _Windows(
        inference.difference_in_sums(total, origin, known),
        blocks,
        origin,
        known,
        window.horizon,
        call.normalise,
        window.queue,
        said if said is None or isinstance(said, str) else float(said),
    )


def _remaining(windows: Sequence[_Windows]) -> NDArray[np.float64]:
    """Return the shares of response and queue that come after each horizon, shape (m, 2)."""
    spans = np.array([window.horizon for window in windows])
    variance = np.array([inference.within(window.blocks.sum(axis=0)) for window in windows])
    n = int(windows[0].blocks[:, :, 0].sum())
    return np.column_stack(
        [horizons.Decay(spans, variance[:, k], n).remaining_at(spans) for k in range(2)]
    )


def _choose(
    method: str, windows: Sequence[_Windows], remaining: NDArray[np.float64], rule: str
) -> _Windows:
    contrasts = [window.contrast for window in windows]
    weights = np.array([_weight(method, contrast) for contrast in contrasts])
    variance = [c.mixture_variance(w) for c, w in zip(contrasts, weights, strict=True)]
    return windows[horizons.choose(rule, weights, contrasts, remaining, np.array(variance))]


def _weight(method: str, contrast: inference.WindowContrast) -> float:
    """Return the weight of the response in the estimate of a DQ method."""
    return {"dq_response": 1.0, "dq_queue": 0.0}.get(method, contrast.best_weight)


def _difference(
    method: str,
    windows: _Windows,
    variance: str,
    level: float,
    rule: str | None,
    memory: horizons.Memory | None,
) -> Estimate:
    """Turn the shared differences into the estimate of one DQ method."""
    contrast = windows.contrast
    alpha = _weight(method, contrast)
    uses: dict[str, Any] = {}
    if method != "dq_response":
        uses |= {"queue": windows.queue, "arrival_rate": windows.arrival_rate}
        uses |= {"variance_queue": contrast.variance_queue}
    if method != "dq_queue":
        uses |= {"variance_response": contrast.variance_response}
    if method == "dq_mixed":
        uses |= {"alpha": alpha, "covariance": contrast.covariance}

    def influence(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
        counts, sums = blocks[:, :, 0], blocks[:, :, 1:3]
        sums = sums + counts[:, :, None] * windows.origin
        parts = inference.influence(counts, sums, windows.propensity)
        return alpha * parts[:, 0] + (1.0 - alpha) * parts[:, 1]

    def estimate(sums: NDArray[np.float64]) -> float:
        without = inference.difference_in_sums(sums, windows.origin, windows.propensity)
        return without.mixture(_weight(method, without))

    by_score = inference.Spread(contrast.mixture_variance(alpha), math.inf)
    spread = inference.spread(variance, by_score, windows.blocks, influence, estimate)
    return Estimate(
        method=method,
        value=contrast.mixture(alpha),
        standard_error=math.sqrt(spread.variance),
        level=level,
        degrees_of_freedom=spread.degrees_of_freedom,
        n_used=int(windows.blocks[:, :, 0].sum()),
        variance=variance,
        horizon=windows.horizon,
        rule=rule,
        memory=memory,
        normalise=windows.normalise,
        **uses,
    )


def check_horizon(horizon: object) -> int | str | None:
    """Return a horizon that is a number of arrivals, the name of a rule, or None."""
    if horizon is None:
        return None
    right = "a number of arrivals >= 1, or one of " + ", ".join(map(repr, horizons.RULES))
    if isinstance(horizon, str):
        if horizon not in horizons.RULES:
            raise validation.refuse("horizon", horizon, right)
        return horizon
    return validation.integer("horizon", horizon, right, at_least=1)


def _resolve_horizon(log: TaskLog, horizon: int | str | None) -> tuple[int | None, str | None]:
    """Return the horizon, or the rule that will choose it."""
    counted = log.n_tasks - log.first_counted
    if isinstance(horizon, str):
        return None, horizon
    if horizon is not None:
        if horizon >= counted:
            raise validation.refuse(
                "horizon", horizon, f"below the number of counted tasks, {counted}"
            )
        return horizon, None
    if log.scenario is not None:
        horizon = log.scenario.default_horizon
    elif log.service_time is not None:
        rate = _estimated_rate(log.n_tasks, log.arrival[0], log.arrival[-1])
        horizon = math.floor(30.0 * rate * float(np.mean(log.service_time)) + 1e-9)
    else:
        return None, "coverage"
    if not 1 <= horizon < counted:
        raise ValueError(
            f"horizon=None means {horizon} for this log, and it must be at least 1 and below the "
            f"number of counted tasks, {counted}: give a horizon"
        )
    return horizon, None


def horizon_grid(counted: int, scenario: Scenario | None) -> tuple[int, ...]:
    """Return the horizons that a rule chooses from."""
    most = math.inf if scenario is None else MOST_DEFAULTS * scenario.default_horizon
    return tuple(int(span) for span in horizons.grid(counted, most))


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
