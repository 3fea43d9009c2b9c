"""How many tasks an experiment needs to see an effect of a given size."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qdq import validation
from qdq.designs import Bernoulli, Design, ServerSplit, Switchback
from qdq.estimators import ArrivalRate, Estimate, estimates_of
from qdq.exact import TrueEffect, true_effect
from qdq.scenario import Scenario
from qdq.study import run_study
from qdq.tasklog import TaskLog

if TYPE_CHECKING:
    import pandas as pd

# Periods of the switchback that is planned by default, in mean service times.
_PERIOD = 300.0


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan:
    """What `plan` found.

    Attributes
    ----------
    effect : float
        Global effect to be seen, in the unit of time.
    power, level : float
        Probability of seeing it, and confidence level of the interval that is to exclude zero.
    pilot_tasks : int
        Tasks of the experiments (of each replication) that the variances come from.
    table : DataFrame
        A row a design and method: ``design, method, share_found`` (mean estimate over the global
        effect; missing for a pilot log, where it is taken to be 1), ``share_found_error``,
        ``unit_error`` (standard error times the root of the number of tasks),
        ``degrees_of_freedom`` (of standard errors), ``n_tasks`` (needed; infinite if the method
        finds nothing of the effect, or its opposite), ``time`` (that they take to arrive).
    """

    effect: float
    power: float
    level: float
    pilot_tasks: int
    table: pd.DataFrame

    def power_at(self, n_tasks: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of an interval beyond zero on the side of the effect, by row.

        Parameters
        ----------
        n_tasks : float or ndarray of float64, shape (m,)

        Returns
        -------
        ndarray of float64, shape (rows,) or (rows, m)
        """
        from scipy.special import ndtr

        share = self.table["share_found"].fillna(1.0).to_numpy(np.float64)
        unit = self.table["unit_error"].to_numpy(np.float64)
        z = np.multiply.outer(share * abs(self.effect) / unit, np.sqrt(n_tasks))
        critical = _critical(self.table["degrees_of_freedom"].to_numpy(np.float64), self.level)
        return np.asarray(ndtr(z - critical.reshape(-1, *[1] * (z.ndim - 1))), np.float64)

    def _headline(self) -> str:
        return (
            f"Tasks needed to see an effect of {self.effect:.4g} with power {self.power:g}, by "
            f"{100 * self.level:g} % intervals"
        )

    def shown(self) -> pd.DataFrame:
        """Return the table as it is printed: numbers to two digits, errors in brackets."""
        import pandas as pd

        table = self.table
        shown: dict[str, Any] = {name: table[name] for name in ("design", "method")}
        if table["share_found"].notna().any():
            pairs = zip(table["share_found"], table["share_found_error"], strict=True)
            shown["share found"] = [f"{share:.2f} ({error:.2f})" for share, error in pairs]
        shown["tasks"] = [_two_digits(n) for n in table["n_tasks"]]
        shown["time"] = [_two_digits(t) for t in table["time"]]
        return pd.DataFrame(shown)

    def __repr__(self) -> str:
        return f"{self._headline()}\n{self.shown().to_string(index=False)}"

    def _repr_html_(self) -> str:
        table = self.shown().to_html(index=False, border=0)
        return f"<p>{html.escape(self._headline())}</p>\n{table}"


def _two_digits(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10.0 else f"{rounded:g}"


def plan(
    what: Scenario | TaskLog,
    effect: float | None = None,
    power: float = 0.8,
    *,
    level: float = 0.95,
    designs: Sequence[Design] | None = None,
    horizon: int | str | None = None,
    queue: str = "in_system",
    arrival_rate: ArrivalRate | None = None,
    pilot_tasks: int = 100_000,
    n_replications: int = 40,
    seed: int = 0,
    n_jobs: int | None = 2,
) -> Plan:
    """Say how many tasks each method and design needs to see an effect.

    With the variance v/n of an estimate and the share s of the effect that it finds in the mean,
    ``n = v (t_(1 - a/2) + z_power)**2 / (s * effect)**2`` tasks give the power asked for, where the
    two-sided test at a = 1 - level rejects if the interval, by Student's t, excludes zero. For a
    scenario v and s come from simulated pilot experiments, for a log v from its own standard
    errors; s is then not known and taken as 1, which favours the naive estimator.

    Parameters
    ----------
    what : Scenario or TaskLog
        The system and its policies, or the log of a pilot experiment.
    effect : float, optional
        Effect on the mean response time that is to be seen, not zero, in the unit of time; by
        default, for a scenario, its true effect.
    power : float, default 0.8
        Probability of seeing it, strictly between `1 - level` and 1.
    level : float, default 0.95
        Confidence level, strictly between 0 and 1.
    designs : sequence of Design, optional
        For a scenario: by default Bernoulli(0.5), a switchback with periods of 300 mean service
        times (a fortieth of the pilot, if that is less), and a server split.
    horizon, queue, arrival_rate
        As for `estimate`.
    pilot_tasks : int, default 100_000
        Tasks of each simulated pilot, >= 1,000.
    n_replications : int, default 40
        Simulated pilots, >= 10.
    seed : int, default 0
    n_jobs : int or None, default 2
        As for `run_study`.

    Returns
    -------
    Plan

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; as `estimate` and `run_study`.

    Examples
    --------
    >>> import qdq
    >>> scenario = qdq.Scenario(n_servers=2, control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2))
    >>> found = qdq.plan(scenario, effect=0.1, pilot_tasks=5000, n_replications=10,
    ...                  designs=[qdq.Bernoulli(0.5)])
    >>> list(found.table.method)
    ['naive', 'dq_response', 'dq_queue', 'dq_mixed']
    """
    import pandas as pd

    level = validation.number("level", level, "strictly between 0 and 1", above=0.0, below=1.0)
    right = f"strictly between 1 - level = {1 - level:.3g} and 1"
    power = validation.number("power", power, right, above=1.0 - level, below=1.0)
    if effect is not None:
        effect = validation.number("effect", effect, "a difference of mean responses, not 0")
        if effect == 0.0:
            raise validation.refuse("effect", effect, "a difference of mean responses, not 0")
    if isinstance(what, TaskLog):
        if effect is None:
            raise ValueError("effect=None needs a scenario: give the effect that is to be seen")
        # Called from here, so that its warnings point to the caller.
        found = estimates_of(what, None, horizon=horizon, queue=queue, arrival_rate=arrival_rate)
        rows = _of_log(what, found)
        pilot, rate = what.n_tasks, (what.n_tasks - 1) / float(np.ptp(what.arrival))
    elif isinstance(what, Scenario):
        right = "an integer >= 1000"
        pilot = validation.integer("pilot_tasks", pilot_tasks, right, at_least=1000)
        right = "an integer >= 10"
        count = validation.integer("n_replications", n_replications, right, at_least=10)
        truth = true_effect(what, seed=seed, n_jobs=n_jobs or 1, progress=False)
        chosen = _default_designs(what, pilot) if designs is None else designs
        options = {"horizon": horizon, "queue": queue, "arrival_rate": arrival_rate}
        rows = _of_scenario(what, truth, pilot, count, seed, n_jobs, chosen, options)
        rate = what.total_arrival_rate
        effect = truth.value if effect is None else effect
        if effect == 0.0:
            raise ValueError("effect=None means 0 for this scenario: give the effect to be seen")
    else:
        raise TypeError(f"what={what!r} is neither a Scenario nor a TaskLog")
    from scipy.special import ndtri

    table = pd.DataFrame(rows)
    away = _critical(table["degrees_of_freedom"].to_numpy(np.float64), level) + float(ndtri(power))
    seen = abs(effect) * np.maximum(table["share_found"].fillna(1.0).to_numpy(np.float64), 0.0)
    with np.errstate(divide="ignore"):
        table["n_tasks"] = np.ceil((away * table["unit_error"].to_numpy(np.float64) / seen) ** 2)
    table["time"] = table["n_tasks"] / rate
    return Plan(effect=effect, power=power, level=level, pilot_tasks=pilot, table=table)


def _default_designs(scenario: Scenario, pilot: int) -> list[Design]:
    span = pilot / scenario.total_arrival_rate
    period = min(_PERIOD * scenario.service.mean, span / 40.0)
    designs: list[Design] = [Bernoulli(0.5), Switchback(period)]
    split = ServerSplit(0.5)
    if scenario.n_servers >= 2 * max(scenario.control.min_servers, scenario.treatment.min_servers):
        designs.append(split)
    return designs


def _of_log(log: TaskLog, found: Sequence[Estimate]) -> list[dict[str, Any]]:
    root = math.sqrt(log.n_tasks - log.first_counted)
    return [
        {
            "design": "that of the log" if log.design is None else repr(log.design),
            "method": estimate.method,
            "share_found": math.nan,
            "share_found_error": math.nan,
            "unit_error": estimate.standard_error * root,
            "degrees_of_freedom": estimate.degrees_of_freedom,
        }
        for estimate in found
    ]


def _of_scenario(
    scenario: Scenario,
    truth: TrueEffect,
    pilot: int,
    count: int,
    seed: int,
    n_jobs: int | None,
    designs: Sequence[Design],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*standard errors are rough", UserWarning)
        study = run_study(
            scenario,
            pilot,
            count,
            seed,
            n_jobs,
            designs=designs,
            truth=truth,
            progress=False,
            **options,
        )
    rows = []
    for row in study.table.to_dict("records"):
        share, share_error = math.nan, math.nan
        if truth.value != 0.0:  # of two policies that are one, there is no share to find
            share = row["mean"] / truth.value
            by_truth = share * truth.standard_error
            share_error = math.hypot(row["mean_error"], by_truth) / abs(truth.value)
        mine = study.replications[
            (study.replications["design"] == row["design"])
            & (study.replications["method"] == row["method"])
        ]
        errors = mine["standard_error"].to_numpy(np.float64)
        freedom = mine["degrees_of_freedom"].to_numpy(np.float64)
        # The standard errors know the variance better than the spread of a few pilots does.
        known = bool(np.isfinite(errors).all())
        spread = math.sqrt(float(np.mean(errors**2))) if known else row["sd"]
        rows.append(
            {
                "design": row["design"],
                "method": row["method"],
                "share_found": share,
                "share_found_error": share_error,
                "unit_error": spread * math.sqrt(pilot),
                "degrees_of_freedom": float(np.median(freedom)) if known else math.inf,
            }
        )
    return rows


def _critical(degrees_of_freedom: NDArray[np.float64], level: float) -> NDArray[np.float64]:
    """Return the two-sided quantiles of Student's t."""
    from scipy.special import ndtri, stdtrit

    upper = 0.5 + 0.5 * level
    infinite = np.isinf(degrees_of_freedom)
    finite = np.where(infinite, 1.0, degrees_of_freedom)
    return np.asarray(np.where(infinite, ndtri(upper), stdtrit(finite, upper)), np.float64)
