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
        The error is by the paired differences, and not below what makes the value as many errors
        from zero as the less certain of the difference and the sum of both biases.
    """
    signs = [float(np.sign(y.mean() - truth)) for y in (x, against)]
    value = (abs(float(against.mean()) - truth) - abs(float(x.mean()) - truth)) / abs(truth)
    paired = signs[1] * against - signs[0] * x
    # The truth is in both biases and in the effect that they are divided by.
    by_truth = (signs[0] - signs[1] - value * math.copysign(1.0, truth)) * truth_error
    error = math.hypot(_error_of_mean(paired), by_truth) / abs(truth)
    # The absolute biases differ as the product of difference and sum of the biases does, so the
    # sign of the less certain of the two decides how certain that is.
    apart, both = against - x, against + x - 2.0 * truth
    errors = _error_of_mean(apart), math.hypot(_error_of_mean(both), 2.0 * truth_error)
    means = abs(float(apart.mean())), abs(float(both.mean()))
    if value != 0.0 and min(means) > 0.0:
        doubts = [error / mean for mean, error in zip(means, errors, strict=True)]
        error = max(error, abs(value) * max(doubts))
    return value, error


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
    if not value > 0.0:
        return value, error
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
    estimates: dict[str, NDArray[np.float64]],
    truth: float,
    truth_error: float,
    comparisons: Sequence[tuple[str, str, str]] = COMPARISONS,
    mirrored: Mapping[str, NDArray[np.float64]] | None = None,
) -> list[dict[str, Any]]:
    """Return the share of the effect that each method finds, and how methods compare.

    Parameters
    ----------
    estimates : dict of str to ndarray of float64, shape (R,)
        Estimates of each method in the same replications, NaN where there is none.
    truth, truth_error : float
        The true effect and its standard error.
    comparisons : sequence of (quantity, method, against), default COMPARISONS
        What to compare; pairs with a method that is not there are left out.
    mirrored : mapping of str to ndarray of float64, shape (M,), optional
        Means of mirrored pairs (see `run_grid`), for methods that have them: what is about the mean
        of a method, ``share_found`` and ``bias_cut``, comes from these where they are more precise.

    Returns
    -------
    list of dict
        Rows ``quantity, method, against, value, error``.
    """
    functions = {"bias_cut": bias_cut, "rmse_ratio": rmse_ratio}
    effect = truth, truth_error
    pairs = mirrored or {}
    rows = []
    for method, x in estimates.items():
        of_both = [y[np.isfinite(y)] for y in (x, pairs.get(method)) if y is not None]
        found = [share_found(y, *effect) for y in of_both]
        rows.append(_quantity("share_found", min(found, key=_error_of), method))
    for quantity, method, against in comparisons:
        found = []
        for sample in (estimates, pairs) if quantity == "bias_cut" else (estimates,):
            if method in sample and against in sample:
                x, y = sample[method], sample[against]
                both = np.isfinite(x) & np.isfinite(y)
                x, y = x[both], y[both]
                ratio = quantity == "sd_ratio"
                found.append(sd_ratio(x, y) if ratio else functions[quantity](x, y, *effect))
        if found:
            rows.append(_quantity(quantity, min(found, key=_error_of), method, against))
    return rows


def _error_of(found: tuple[float, float]) -> float:
    return found[1]


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
        response) and ``relative_bias, relative_rmse`` (over the absolute effect) with errors. Where
        ``n_mirrored`` is above 0, ``bias`` and its error come from as many mirrored pairs, since
        these are more precise than the ``mean``.
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
        times = f"{counts.min():,}"
        if counts.max() > counts.min():
            times += f" to {counts.max():,}"
        text = (
            f"**Precision.** Experiments were replicated {times} times. The standard error of the "
            f"SD is below {100 * _SD_PRECISION:g} % of it in {int(precise.sum())} of {len(frame)} "
            f"rows, and that of the bias below a tenth of the effect (of "
            f"{100 * _SMALL_EFFECT:g} % of control's mean response, if that is more) in "
            f"{int(known.sum())}."
        )
        missing = frame[~known].drop_duplicates(list(self.coordinates))
        if len(missing):
            text += (
                f" Some bias is less well known in {len(missing)} of {len(self.scenarios)} cells. "
                "More replications would settle it: raise `max_replications`."
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
    n_mirrored: int | None = None,
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
    n_mirrored : int, optional
        How many of the Bernoulli experiments are run again with their arms swapped; by default a
        quarter of `n_replications`, and two at least; 0 for none.
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

    Notes
    -----
    *Mirrored pairs.* With the policies of both arms swapped and the treated share 1 - p instead of
    p, the system is the same in law, and an estimate has the opposite mean. Under the same random
    numbers at p = 1/2 the same tasks are called treated, so that what the estimate owes to the
    chance of who was treated, most of the noise of DQ, is the same in both: half of their
    difference has the estimator's mean and a far smaller spread.
    """
    if n_mirrored is None:
        n_mirrored = max(2, n_replications // 4) if n_replications >= 2 else 2
    _check(
        scenarios,
        n_tasks,
        switchback_period,
        n_replications,
        max_replications,
        propensity,
        slope_step,
        n_mirrored,
        seed,
        n_jobs,
    )
    variants: dict[str, Any] = {
        "normalise": normalise,
        "queue": queue,
        "arrival_rate": arrival_rate,
        "horizon": horizon,
    }
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
                truth=truth,
                n_jobs=n_jobs,
                **variants,
            )
            for designs in (
                (Bernoulli(propensity),),
                (Switchback(switchback_period), ServerSplit()),
            )
        ]
        where = dict(zip(coordinates, cell, strict=True))
        swapped = None
        if n_mirrored:
            swapped = run_study(
                scenario.replace(control=scenario.treatment, treatment=scenario.control),
                n_tasks,
                n_mirrored,
                seed,
                n_jobs,
                designs=Bernoulli(1.0 - propensity),
                truth=-truth.value,
                progress=False,
                **variants,
            )
        result, compared = tables_of(studies, truth, swapped)
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
    n_mirrored: int,
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
    right = f"0, or an integer from 2 to n_replications={n_replications}"
    validation.integer("n_mirrored", n_mirrored, right, at_least=0, at_most=n_replications)
    if n_mirrored == 1:
        raise validation.refuse("n_mirrored", n_mirrored, right)
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


def tables_of(
    studies: Sequence[Study], truth: TrueEffect, swapped: Study | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return how each method does in some studies of one scenario, and how methods compare.

    Parameters
    ----------
    studies : sequence of Study
        With different designs and one seed.
    truth : TrueEffect
    swapped : Study, optional
        The Bernoulli experiments of the first replications with their arms swapped.

    Returns
    -------
    results, quantities : DataFrame
        As in `Grid`, without coordinates and without what is the same in all rows.
    """
    table = pd.concat([study.table for study in studies], ignore_index=True)
    drawn = pd.concat([study.replications for study in studies], ignore_index=True)
    mirrored = drawn.iloc[:0] if swapped is None else _mirrored(drawn, swapped)
    bias, errors = (table[name].to_numpy(np.float64).copy() for name in ("bias", "bias_error"))
    table["n_mirrored"] = 0
    for key, part in mirrored.groupby("row") if len(mirrored) else ():
        place = int(str(key))
        x = part["value"].to_numpy(np.float64)
        error = math.hypot(_error_of_mean(x), truth.standard_error)
        if error < errors[place]:
            bias[place], errors[place] = x.mean() - truth.value, error
            table.loc[place, "n_mirrored"] = x.size
    table["bias"], table["bias_error"] = bias, errors
    size = abs(truth.value)
    for name in ("bias", "rmse"):
        table[f"relative_{name}"] = table[name] / size
        table[f"relative_{name}_error"] = table[f"{name}_error"] / size
    # The truth is in the bias, and in the effect that it is divided by: together, the mean is.
    of_mean = table["bias_error"] ** 2 - truth.standard_error**2
    by_truth = (
        1.0 + math.copysign(1.0, truth.value) * table["relative_bias"]
    ) * truth.standard_error
    table["relative_bias_error"] = np.sqrt(np.maximum(of_mean, 0.0) + by_truth**2) / size

    alone = _by_method(drawn[drawn["horizon"].isna()])
    alone_in_pairs = _by_method(mirrored[mirrored["horizon"].isna()])
    pairs = {_key(variant): x for variant, x in _variants(mirrored[mirrored["horizon"].notna()])}
    rows: list[dict[str, Any]] = []
    for variant, estimates in _variants(drawn[drawn["horizon"].notna()]):
        shortest = min(x.size for x in (alone | estimates).values())
        together = {method: x[:shortest] for method, x in (alone | estimates).items()}
        in_pairs = alone_in_pairs | pairs.get(_key(variant), {})
        effect = truth.value, truth.standard_error
        for row in compare(together, *effect, mirrored=in_pairs):
            rows.append(variant | row)
    return table, pd.DataFrame(rows, columns=[*VARIANT, *_quantity("", (0.0, 0.0))])


def _mirrored(drawn: pd.DataFrame, swapped: Study) -> pd.DataFrame:
    """Return half the difference of each estimate and its mirror image, by row of the table."""
    bernoulli = drawn[drawn["design"].str.startswith("Bernoulli")]
    count = swapped.n_replications
    ours = bernoulli[bernoulli["replication"] < count].reset_index(drop=True)
    theirs = swapped.replications.reset_index(drop=True)
    half = 0.5 * (ours["value"] - theirs["value"])
    return ours.assign(value=half, row=ours.index % (len(ours) // count))


def _key(variant: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(variant.values())


def _by_method(part: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    return {str(method): _values(of) for method, of in part.groupby("method", sort=False)}


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
        yield variant, _by_method(drawn[inside])


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
