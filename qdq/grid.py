"""Experiments over a grid of scenarios, and the quantities that the book's claims are about.

Each cell of the grid is a scenario. It is run under the three designs, with the same number of
tasks, until standard deviations and biases are precise enough; its true effect, the slope and
both readings of the effect come from simulations of their own. All is kept in tidy frames: a row
a method and variant, and a row a quantity, each with its Monte Carlo standard error.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import joblib
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from tqdm import tqdm

from qdq import validation
from qdq.designs import AllControl, AllTreatment, Bernoulli, Design, ServerSplit, Switchback
from qdq.estimators import ArrivalRate
from qdq.exact import TrueEffect, true_effect
from qdq.scenario import ArrivalTrace, Scenario
from qdq.simulate import simulate
from qdq.study import Study, run_study

VARIANT = ("horizon", "normalise", "queue", "arrival_rate")
"""Columns that say which variant of the DQ methods a row is of."""

COMPARISONS = (
    *(("bias_cut", method, "naive") for method in ("dq_response", "dq_queue", "dq_mixed")),
    *(("bias_cut", "dq_mixed", against) for against in ("dq_response", "dq_queue")),
    *(("sd_ratio", method, "naive") for method in ("dq_response", "dq_queue", "dq_mixed")),
    *(("sd_ratio", method, "dq_mixed") for method in ("dq_response", "dq_queue")),
    *(("sd_ratio", "dq_mixed", against) for against in ("dq_response", "dq_queue")),
    *(
        ("rmse_ratio", "dq_mixed", against)
        for against in ("naive", "server_split", "dq_queue", "dq_response", "switchback")
    ),
)
"""Quantities that compare a method with another: their name, the method, and the other."""

# What the Monte Carlo standard errors are to reach: of an SD, relative; of a bias, over the effect
# (over the second share of control's mean response, where the effect is smaller than that).
_SD_PRECISION = 0.04
_BIAS_PRECISION = 0.1
_SMALL_EFFECT = 0.01


# --------------------------------------------------------------------------------------------------
# Quantities, each a value and its Monte Carlo standard error
# --------------------------------------------------------------------------------------------------


def share_found(x: NDArray[np.float64], truth: float, truth_error: float) -> tuple[float, float]:
    """Return the mean of estimates over the true effect, and its standard error.

    Parameters
    ----------
    x : ndarray of float64, shape (R,)
        Estimates, one a replication.
    truth, truth_error : float
        The true effect and its standard error.

    Returns
    -------
    value, error : float
    """
    share = float(x.mean()) / truth
    return share, math.hypot(_error_of_mean(x), share * truth_error) / abs(truth)


def bias_cut(
    x: NDArray[np.float64], against: NDArray[np.float64], truth: float, truth_error: float
) -> tuple[float, float]:
    """Return by how much the absolute bias of `x` is smaller, in absolute effects.

    Parameters
    ----------
    x, against : ndarray of float64, shape (R,)
        Estimates of both methods in the same replications.
    truth, truth_error : float
        As for `share_found`.

    Returns
    -------
    value, error : float
        The error is by the paired differences; the signs of both biases are taken as known.
    """
    signs = np.sign(x.mean() - truth), np.sign(against.mean() - truth)
    value = (abs(float(against.mean()) - truth) - abs(float(x.mean()) - truth)) / abs(truth)
    paired = signs[1] * against - signs[0] * x
    by_truth = float(signs[0] - signs[1]) * truth_error
    return value, math.hypot(_error_of_mean(paired), by_truth) / abs(truth)


def sd_ratio(x: NDArray[np.float64], against: NDArray[np.float64]) -> tuple[float, float]:
    """Return the standard deviation of `x` over that of `against`.

    Parameters
    ----------
    x, against : ndarray of float64, shape (R,)
        As for `bias_cut`.

    Returns
    -------
    value, error : float
        The error is that of the difference of the log variances, replication by replication.
    """
    squares = (x - x.mean()) ** 2, (against - against.mean()) ** 2
    return _root_ratio(*squares)


def rmse_ratio(
    x: NDArray[np.float64], against: NDArray[np.float64], truth: float, truth_error: float
) -> tuple[float, float]:
    """Return the root mean squared error of `x` over that of `against`.

    Parameters
    ----------
    x, against, truth, truth_error
        As for `bias_cut`.

    Returns
    -------
    value, error : float
    """
    value, error = _root_ratio((x - truth) ** 2, (against - truth) ** 2)
    slopes = [(float(y.mean()) - truth) / float(np.mean((y - truth) ** 2)) for y in (x, against)]
    return value, math.hypot(error, value * (slopes[1] - slopes[0]) * truth_error)


def _root_ratio(x: NDArray[np.float64], against: NDArray[np.float64]) -> tuple[float, float]:
    """Return the root of the ratio of two means, and its error to first order."""
    if not against.mean() > 0.0:
        return math.nan, math.nan
    value = math.sqrt(float(x.mean() / against.mean()))
    if value == 0.0:
        return 0.0, 0.0
    return value, 0.5 * value * _error_of_mean(x / x.mean() - against / against.mean())


def _error_of_mean(x: NDArray[np.float64]) -> float:
    return float(np.std(x, ddof=1)) / math.sqrt(x.size)


def compare(
    estimates: Mapping[str, NDArray[np.float64]],
    truth: float,
    truth_error: float,
    comparisons: Sequence[tuple[str, str, str]] = COMPARISONS,
) -> list[dict[str, Any]]:
    """Return the share of the effect that each method finds, and how methods compare.

    Parameters
    ----------
    estimates : mapping of str to ndarray of float64, shape (R,)
        Estimates of each method in the same replications, NaN where there is none.
    truth, truth_error : float
        The true effect and its standard error.
    comparisons : sequence of (quantity, method, against), default COMPARISONS
        What to compare; pairs with a method that is not there are left out.

    Returns
    -------
    list of dict
        Rows ``quantity, method, against, value, error``.
    """
    rows = []
    for method, x in estimates.items():
        found = share_found(x[np.isfinite(x)], truth, truth_error)
        rows.append(_quantity("share_found", found, method))
    for quantity, method, against in comparisons:
        if method in estimates and against in estimates:
            x, y = estimates[method], estimates[against]
            both = np.isfinite(x) & np.isfinite(y)
            x, y = x[both], y[both]
            if quantity == "sd_ratio":
                found = sd_ratio(x, y)
            else:
                function = bias_cut if quantity == "bias_cut" else rmse_ratio
                found = function(x, y, truth, truth_error)
            rows.append(_quantity(quantity, found, method, against))
    return rows


def _quantity(
    name: str, found: tuple[float, float], method: str = "", against: str = ""
) -> dict[str, Any]:
    value, error = found
    return {
        "quantity": name,
        "method": method,
        "against": against,
        "value": value,
        "error": error,
    }


# --------------------------------------------------------------------------------------------------
# The grid
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Grid:
    """What `run_grid` found.

    Attributes
    ----------
    coordinates : tuple of str
        Names of what sets the cells apart.
    scenarios, truths : dict
        Scenario and true effect of each cell, by its values of the coordinates.
    results : DataFrame
        How each method does: the coordinates, then the columns of `Study.table`, ``n_tasks``,
        ``gte, gte_error, control`` (the true effect, its standard error, and control's mean
        response) and ``relative_bias, relative_rmse`` (over the absolute effect) with errors.
    quantities : DataFrame
        Rows ``quantity, method, against, value, error`` with the coordinates, the variant,
        ``n_tasks`` and ``gte, gte_error, control``: ``direct, slope, gte, gte_w, gte_q, gap`` and
        what `compare` gives.
    replications : DataFrame
        The coordinates, then the columns of `Study.replications`.
    """

    coordinates: tuple[str, ...]
    scenarios: dict[tuple[Any, ...], Scenario]
    truths: dict[tuple[Any, ...], TrueEffect]
    results: pd.DataFrame
    quantities: pd.DataFrame
    replications: pd.DataFrame

    def __repr__(self) -> str:
        return f"Grid: {len(self.scenarios)} cells by {', '.join(self.coordinates)}"

    def main(self, **variant: Any) -> pd.DataFrame:
        """Return the rows of `results` of one variant of the DQ methods.

        Parameters
        ----------
        **variant
            Values of the columns `horizon`, `normalise`, `queue`, `arrival_rate`; by default group
            means and the first of the others.

        Returns
        -------
        DataFrame
            One row a cell and method. What has no use for a part of the variant is kept.
        """
        frame = self.results
        wanted = {"normalise": "group_means", "queue": frame["queue"].dropna().iloc[0]} | variant
        for name, value in wanted.items():
            frame = frame[frame[name].isna() | (frame[name] == value).fillna(False)]
        frame = frame.drop_duplicates([*self.coordinates, "method"])
        return frame.reset_index(drop=True)

    def precision(self, **variant: Any) -> str:
        """Say how often experiments were replicated, and where that is not precise enough.

        Parameters
        ----------
        **variant
            As for `main`.

        Returns
        -------
        str
            A paragraph of Markdown.
        """
        frame = self.main(**variant)
        size = np.maximum(frame["gte"].abs(), _SMALL_EFFECT * frame["control"])
        precise = frame["sd_error"] < _SD_PRECISION * frame["sd"]
        known = frame["bias_error"] < _BIAS_PRECISION * size
        counts = frame["n_replications"]
        text = (
            f"**Precision.** Experiments were replicated {counts.min():,} to {counts.max():,} "
            f"times. The standard error of the SD is below {100 * _SD_PRECISION:g} % of it in "
            f"{int(precise.sum())} of {len(frame)} rows, and that of the bias below a tenth of the "
            f"effect (of {100 * _SMALL_EFFECT:g} % of control's mean response, if that is more) in "
            f"{int(known.sum())}."
        )
        missing = frame[~known].drop_duplicates(list(self.coordinates))
        if len(missing):
            cells = [
                ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in self.coordinates)
                for _, row in missing.iterrows()
            ]
            text += (
                f" Some bias is less well known in {len(cells)} of {len(self.scenarios)} cells: "
                f"{'; '.join(cells)}. More replications would settle it: raise `max_replications`."
            )
        return text


def run_grid(
    scenarios: Mapping[tuple[Any, ...], Scenario],
    coordinates: Sequence[str],
    *,
    n_tasks: int,
    switchback_period: float,
    n_replications: int,
    max_replications: int,
    seed: int,
    propensity: float = 0.5,
    slope_step: float = 0.1,
    normalise: str | Sequence[str] = "group_means",
    queue: str | Sequence[str] = "in_system",
    arrival_rate: ArrivalRate | Sequence[ArrivalRate | None] | None = None,
    horizon: int | Sequence[int] | None = None,
    truths: Mapping[tuple[Any, ...], TrueEffect] | None = None,
    n_jobs: int = 2,
    progress: bool | None = None,
) -> Grid:
    """Run every scenario of a grid under the three designs, and compare the methods.

    Parameters
    ----------
    scenarios : mapping
        The scenario of each cell, by a tuple of its values of the coordinates.
    coordinates : sequence of str
        Names of the coordinates; they become columns.
    n_tasks : int
        Tasks of each experiment.
    switchback_period : float
        In the scenario's unit of time.
    n_replications, max_replications : int
        Fewest and most replications of each experiment. They go on until the standard error of
        every SD is below 4 % and that of every bias (with group means) below a tenth of the effect,
        or of 1 % of control's mean response if that is more.
    seed : int
        Of everything.
    propensity, slope_step : float
        Treated share p, and the distance from it of the two shares that give the slope.
    normalise, queue, arrival_rate, horizon
        As for `run_study`.
    truths : mapping, optional
        True effects that are known already, by cell.
    n_jobs : int, default 2
        Threads; results do not depend on it.
    progress : bool, optional
        As for `run_study`.

    Returns
    -------
    Grid

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, before anything runs; as `run_study`.
    """
    _check(
        scenarios,
        n_tasks,
        switchback_period,
        n_replications,
        max_replications,
        propensity,
        slope_step,
        seed,
        n_jobs,
    )
    hidden = None if progress is None else not progress
    known = dict(truths or {})
    results, quantities, replications = [], [], []
    for cell, scenario in tqdm(scenarios.items(), desc="grid", unit="cell", disable=hidden):
        if cell not in known:
            known[cell] = true_effect(scenario, seed=seed, n_jobs=n_jobs, progress=False)
        truth = known[cell]
        studies = [
            precise_study(
                scenario,
                n_tasks,
                seed,
                designs=designs,
                n_replications=n_replications,
                max_replications=max_replications,
                normalise=normalise,
                queue=queue,
                arrival_rate=arrival_rate,
                horizon=horizon,
                truth=truth,
                n_jobs=n_jobs,
            )
            for designs in (
                (Bernoulli(propensity),),
                (Switchback(switchback_period), ServerSplit()),
            )
        ]
        where = dict(zip(coordinates, cell, strict=True))
        result, compared = tables_of(studies, truth)
        count = max(8, n_replications // 8)
        naive = result[result["method"] == "naive"].iloc[0]
        rows = [_quantity("direct", (naive["mean"], naive["mean_error"]))]
        rows += _estimands(scenario, n_tasks, seed, propensity, slope_step, count, n_jobs)
        rows.append(_quantity("gte", (truth.value, truth.standard_error)))
        compared = pd.concat([pd.DataFrame(rows), compared], ignore_index=True)
        context = {"n_tasks": n_tasks} | _of_truth(truth)
        results.append(_labelled(result.assign(**context), where))
        quantities.append(_labelled(compared.assign(**context), where))
        drawn = pd.concat([study.replications for study in studies], ignore_index=True)
        replications.append(_labelled(drawn, where))
    return Grid(
        coordinates=tuple(coordinates),
        scenarios=dict(scenarios),
        truths={cell: known[cell] for cell in scenarios},
        results=_joined(results),
        quantities=_joined(quantities),
        replications=_joined(replications),
    )


def _check(
    scenarios: Mapping[tuple[Any, ...], Scenario],
    n_tasks: int,
    switchback_period: float,
    n_replications: int,
    max_replications: int,
    propensity: float,
    slope_step: float,
    seed: int,
    n_jobs: int,
) -> None:
    if not scenarios:
        raise validation.refuse("scenarios", scenarios, "a mapping that is not empty")
    fewest = 2 * max(scenario.default_horizon for scenario in scenarios.values())
    right = f"an integer of at least {fewest}, two default horizons of every scenario"
    validation.integer("n_tasks", n_tasks, right, at_least=fewest)
    validation.number("slope_step", slope_step, "> 0 and < 1/4", above=0.0, below=0.25)
    low, high = 2.0 * slope_step, 1.0 - 2.0 * slope_step
    right = f"from 2 slope_step to 1 - 2 slope_step, here {low:g} to {high:g}"
    validation.number("propensity", propensity, right, at_least=low, at_most=high)
    validation.integer("n_replications", n_replications, "an integer >= 2", at_least=2)
    right = f"an integer >= n_replications={n_replications}"
    validation.integer("max_replications", max_replications, right, at_least=n_replications)
    shortest = min(n_tasks / scenario.total_arrival_rate for scenario in scenarios.values())
    right = f"> 0 and at most {shortest / 8:g}, so that every log holds eight periods"
    validation.number(
        "switchback_period", switchback_period, right, above=0.0, at_most=shortest / 8
    )
    validation.integer("seed", seed, "an integer >= 0", at_least=0)
    validation.integer("n_jobs", n_jobs, "an integer >= 1", at_least=1)


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    # Columns that are empty in one cell must not change the type of the others'.
    return pd.concat([frame.astype(object) for frame in frames], ignore_index=True).infer_objects()


def _labelled(frame: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    frame = frame.copy()
    for place, (name, value) in enumerate(where.items()):
        frame.insert(place, name, value)
    return frame


def _of_truth(truth: TrueEffect) -> dict[str, float]:
    return {
        "gte": truth.value,
        "gte_error": truth.standard_error,
        "control": truth.mean_response_control,
    }


def precise_study(
    scenario: Scenario,
    n_tasks: int,
    seed: int,
    *,
    designs: Sequence[Design],
    n_replications: int,
    max_replications: int,
    truth: TrueEffect,
    n_jobs: int = 2,
    **variants: Any,
) -> Study:
    """Replicate until SDs and biases are precise, as `run_grid` says, or the budget is used.

    Parameters
    ----------
    scenario, n_tasks, seed, designs, n_replications, max_replications, truth, n_jobs
        As for `run_grid` and `run_study`.
    **variants
        More arguments of `run_study`.

    Returns
    -------
    Study
    """
    target = _BIAS_PRECISION * max(abs(truth.value), _SMALL_EFFECT * truth.mean_response_control)
    count = n_replications
    with tempfile.TemporaryDirectory() as folder:  # so that more replications add to those done
        while True:
            study = run_study(
                scenario,
                n_tasks,
                count,
                seed,
                n_jobs,
                folder,
                designs=designs,
                truth=truth,
                progress=False,
                **variants,
            )
            table = study.table
            means = table["normalise"].ne("inverse_propensity").fillna(True)
            worst = max(
                (table["sd_error"] / (_SD_PRECISION * table["sd"])).max(),
                (table["mean_error"] / target)[means].max(),
            )
            if not worst > 1.0 or count == max_replications:
                return study
            count = min(math.ceil(1.05 * count * worst**2), max_replications)


def tables_of(studies: Sequence[Study], truth: TrueEffect) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return how each method does in some studies of one scenario, and how methods compare.

    Parameters
    ----------
    studies : sequence of Study
        With different designs and one seed.
    truth : TrueEffect

    Returns
    -------
    results, quantities : DataFrame
        As in `Grid`, without coordinates and without what is the same in all rows.
    """
    table = pd.concat([study.table for study in studies], ignore_index=True)
    size = abs(truth.value)
    for name in ("bias", "rmse"):
        table[f"relative_{name}"] = table[name] / size
        table[f"relative_{name}_error"] = table[f"{name}_error"] / size

    drawn = pd.concat([study.replications for study in studies], ignore_index=True)
    alone = {
        str(method): _values(part)
        for method, part in drawn[drawn["horizon"].isna()].groupby("method", sort=False)
    }
    rows: list[dict[str, Any]] = []
    for variant, estimates in _variants(drawn[drawn["horizon"].notna()]):
        shortest = min(x.size for x in (alone | estimates).values())
        together = {method: x[:shortest] for method, x in (alone | estimates).items()}
        for row in compare(together, truth.value, truth.standard_error):
            rows.append(variant | row)
    return table, pd.DataFrame(rows, columns=[*VARIANT, *_quantity("", (0.0, 0.0))])


def _values(part: pd.DataFrame) -> NDArray[np.float64]:
    return part.sort_values("replication")["value"].to_numpy(np.float64)


def _variants(
    drawn: pd.DataFrame,
) -> Iterator[tuple[dict[str, Any], dict[str, NDArray[np.float64]]]]:
    """Yield each variant of the DQ methods with its estimates.

    wDQ belongs to every reading of the queue; the time average goes with every arrival rate.
    """
    columns = {name: list(dict.fromkeys(drawn[name].dropna())) for name in VARIANT}
    columns["arrival_rate"] = columns["arrival_rate"] or [None]
    for values in itertools.product(*columns.values()):
        variant = dict(zip(VARIANT, values, strict=True))
        if variant["queue"] == "time_average":
            if variant["arrival_rate"] != columns["arrival_rate"][0]:
                continue
            variant["arrival_rate"] = None
        inside = np.ones(len(drawn), np.bool_)
        for name, value in variant.items():
            same = drawn[name].isna() if value is None else (drawn[name] == value).fillna(False)
            unused = drawn["method"].eq("dq_response") & drawn[name].isna()
            inside &= (same | unused).to_numpy(np.bool_)
        yield variant, {str(m): _values(p) for m, p in drawn[inside].groupby("method", sort=False)}


def _estimands(
    scenario: Scenario,
    n_tasks: int,
    seed: int,
    propensity: float,
    slope_step: float,
    count: int,
    n_jobs: int,
) -> list[dict[str, Any]]:
    """Return slope, both readings of the effect, and their gap, by paired simulations.

    Each replication runs four treated shares with the same random numbers. The queue is read as
    arrivals find it, over the arrival rate at that moment.
    """

    def readings(j: int) -> tuple[float, ...]:
        around = [Bernoulli(propensity - slope_step), Bernoulli(propensity + slope_step)]
        response, queue = [], []
        for design in (AllControl(), *around, AllTreatment()):
            log = simulate(scenario, design, n_tasks, (seed, 2, j), record=["in_system"])
            response.append(float(log.response_time.mean()))
            assert log.in_system is not None
            arrivals = scenario.arrivals
            if isinstance(arrivals, ArrivalTrace):
                rate: Any = scenario.total_arrival_rate
            else:
                rate = scenario.n_servers * np.asarray(arrivals.rate_at(log.arrival))
            queue.append(float((log.in_system / rate).mean()))
        slope = (response[2] - response[1]) / (2.0 * slope_step)
        return slope, response[3] - response[0], queue[3] - queue[0]

    jobs = (joblib.delayed(readings)(j) for j in range(count))
    sample = np.array(joblib.Parallel(n_jobs, backend="threading")(jobs))
    slope, by_response, by_queue = sample.T
    size = abs(float(by_response.mean()))
    named = {"slope": slope, "gte_w": by_response, "gte_q": by_queue}
    rows = [_quantity(n, (float(x.mean()), _error_of_mean(x))) for n, x in named.items()]
    # The difference of the two is small and correlated with neither's size: a plain ratio.
    gap = (by_queue - by_response) / size
    return [*rows, _quantity("gap", (float(gap.mean()), _error_of_mean(gap)))]
