"""Many replications of an experiment, and how far each estimator is from the truth in them.

Replication j of a study with seed s is `simulate` with the seed ``(s, j)``, for every design: so it
can be made again by itself, and designs meet the same arrivals and requirements. Nothing depends on
the number of threads. With a store (a folder), replications are on disk as soon as they are
finished, and a run that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from qdq import estimators, inference, validation
from qdq.designs import AllControl, AllTreatment, Bernoulli, Design, ServerSplit, Switchback
from qdq.estimators import ArrivalRate, Call, Estimate
from qdq.exact import TrueEffect, true_effect
from qdq.provenance import source_hash
from qdq.scenario import ArrivalTrace, Periodic, Scenario
from qdq.simulate import Seed, seed_sequence, stream

if TYPE_CHECKING:
    import pandas as pd

# What a replication leaves for each row of its labels; all the rest follows.
_STORED = ("value", "standard_error", "degrees_of_freedom", "alpha", "n_used", "horizon")
_LABELS = ("design", "method", "rule", "horizon", "normalise", "queue", "arrival_rate", "variance")
# A row of a replication; None where a number does not apply, or where there is no estimate.
_Row = list[float | None]

# Replications to a file of the store. It must not depend on how many are asked for.
_CHUNK = 10


# --------------------------------------------------------------------------------------------------
# What is run
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """All that a replication depends on. Plain data, so that any backend of joblib can send it."""

    scenario: Scenario
    designs: tuple[Design, ...]
    n_tasks: int
    seed: int
    horizon: tuple[int | str, ...]
    normalise: tuple[str, ...]
    queue: tuple[str, ...]
    arrival_rate: tuple[ArrivalRate, ...]
    variance: tuple[str | None, ...]
    washout: float
    warm_up: float

    def calls(self, design: Design) -> Iterator[Call]:
        """Yield the calls that estimate each method and variant once."""
        if not isinstance(design, Bernoulli):
            for by in self.variance:
                methods = estimators.METHODS_OF[type(design)]
                unequal = False
                if isinstance(design, ServerSplit):
                    unequal = not design.equal_groups(self.scenario)
                yield Call(methods, washout=self.washout, variance=by, unequal_groups=unequal)
            return
        for by in self.variance:
            yield Call(("naive",), variance=by)
        one_rate = np.ptp(self.scenario.rates) == 0.0
        for horizon, normalise in itertools.product(self.horizon, self.normalise):
            first: tuple[str, ...] = ("dq_response",)  # it has no use for what the queue's sums are
            for queue in self.queue:
                mixed = ("dq_mixed",) if queue != "waiting" or one_rate else ()
                # The time average needs no rate.
                for rate in (None,) if queue == "time_average" else self.arrival_rate:
                    methods = (*first, "dq_queue", *mixed)
                    for by in self.variance:
                        call = Call(methods, None, normalise, queue, rate, variance=by)
                        yield self._with_horizon(call, horizon)
                    first = ()

    def _with_horizon(self, call: Call, horizon: int | str) -> Call:
        if isinstance(horizon, str):
            grid = estimators.horizon_grid(self.n_tasks, self.scenario)
            return call._replace(rule=horizon, grid=grid)
        return call._replace(horizon=horizon)

    def labels(self) -> list[dict[str, Any]]:
        """Return what each row of a replication is of."""
        rows = []
        for design in self.designs:
            for call in self.calls(design):
                for method in call.methods:
                    row = dict.fromkeys(_LABELS) | {"design": repr(design), "method": method}
                    row |= {"variance": call.variance or estimators.VARIANCE_OF[method]}
                    if method.startswith("dq_"):
                        row |= {"rule": call.rule, "horizon": call.horizon}
                        row |= {"normalise": call.normalise}
                    if method in ("dq_queue", "dq_mixed"):
                        row |= {"queue": call.queue}
                        row |= {"arrival_rate": _rate_label(call.arrival_rate)}
                    rows.append(row)
        return rows

    def spec(self) -> dict[str, Any]:
        """Return the plan as a JSON-native dictionary, with the source that would run it.

        Raises
        ------
        TypeError
            If it holds a function of the user's.
        """
        if any(callable(rate) for rate in self.arrival_rate):
            raise TypeError("arrival_rate is a function, which cannot be written to a file")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {"scenario": self.scenario.to_dict()}
        values |= {"designs": [design.to_dict() for design in self.designs]}
        # Results of different sources must never be mixed.
        values |= {"source": source_hash()}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def replicate(self, j: int) -> list[_Row]:
        """Simulate and estimate replication j: a row of `_STORED` for each of the labels."""
        try:
            return [row for design in self.designs for row in self._rows(design, j)]
        except Exception as error:
            error.add_note(f"This was replication {j} of the study, seed=({self.seed}, {j}).")
            raise

    def _rows(self, design: Design, j: int) -> list[_Row]:
        try:
            return [_row(estimate) for estimate in self.estimates(design, (self.seed, j))]
        except ValueError:
            # Arguments have been checked: the draw left an arm with less than two periods.
            if not isinstance(design, Switchback):
                raise
            return [[None] * len(_STORED)]

    def estimates(self, design: Design, seed: Seed, level: float = 0.95) -> Iterator[Estimate]:
        """Simulate and estimate in one pass: an estimate for each method of each of the calls."""
        calls = list(self.calls(design))
        bernoulli = isinstance(design, Bernoulli)
        carried_over, propensity, chunks = stream(
            self.scenario,
            design,
            self.n_tasks,
            seed,
            self.warm_up,
            washout=self.washout,
            with_start=bernoulli and "waiting" in self.queue,
        )
        sums = estimators.sums_of(calls, self.n_tasks, 0, carried_over, self.scenario)
        for chunk in chunks:
            sums.add(chunk)
        for call in calls:
            yield from estimators.estimates_from(sums, call, self.scenario, propensity, level)


def _row(estimate: Estimate) -> _Row:
    values = (getattr(estimate, name) for name in _STORED)
    return [None if value is None or not math.isfinite(value) else value for value in values]


def _rate_label(arrival_rate: ArrivalRate | None) -> str | None:
    if callable(arrival_rate):
        return "function"
    return (
        arrival_rate
        if arrival_rate is None or isinstance(arrival_rate, str)
        else repr(arrival_rate)
    )


# --------------------------------------------------------------------------------------------------
# The store
# --------------------------------------------------------------------------------------------------


class _Store:
    """A folder with study.json (what was run), truth.json, chunks of replications, and the result.

    A file is either whole or not there. Chunks and truth carry a digest of themselves and of the
    study, so that what a bad disk has spoilt, or another study has left, is found out.
    """

    def __init__(self, folder: Path, plan: _Plan) -> None:
        self.folder = folder
        self.spec = _dump(plan.spec())
        self.n_rows = len(plan.labels())
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ValueError(f"store={str(folder)!r} is a file: it must be a folder") from None
        self._claim()

    def _claim(self) -> None:
        path = self.folder / "study.json"
        if path.exists():
            try:
                there = json.loads(path.read_bytes())
            except ValueError as error:
                raise ValueError(
                    f"store={str(self.folder)!r} has a study.json that can't be read ({error}): "
                    "delete the folder, or use another one"
                ) from None
            difference = _first_difference(there, json.loads(self.spec))
            if difference is not None:
                raise ValueError(
                    f"store={str(self.folder)!r} holds another study: {difference}; use another "
                    "folder, or delete this one to start anew"
                )
            return
        if any(not other.name.endswith(".part") for other in self.folder.iterdir()):
            raise ValueError(
                f"store={str(self.folder)!r} holds files but no study.json: it must be the folder "
                "of a study, empty or new"
            )
        _write(path, self.spec)

    def _digest(self, name: str, content: Any) -> str:
        return hashlib.sha256(f"{self.spec}{name}\n{_dump(content)}".encode()).hexdigest()

    def _save(self, name: str, content: Any) -> None:
        data = {"sha256": self._digest(name, content), "content": content}
        _write(self.folder / name, _dump(data))

    def _load(self, name: str) -> Any:
        """Return what was saved; None if there is nothing, or with a warning if it is spoilt."""
        path = self.folder / name
        try:
            data = json.loads(path.read_bytes())
            if data["sha256"] == self._digest(name, data["content"]):
                return data["content"]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            pass
        warnings.warn(
            f"{path} is damaged, or of another study: it is computed anew",
            UserWarning,
            stacklevel=5,
        )
        return None

    def truth(self, scenario: Scenario) -> TrueEffect | None:
        content = self._load("truth.json")
        return None if content is None else TrueEffect(**content, scenario=scenario)

    def save_truth(self, truth: TrueEffect) -> None:
        content = {f.name: getattr(truth, f.name) for f in fields(truth) if f.name != "scenario"}
        self._save("truth.json", content)

    def chunk(self, first: int) -> list[list[_Row]]:
        """Return the finished replications from `first` on, at most as many as a chunk holds."""
        return self._load(_chunk_name(first)) or []

    def save_chunk(self, first: int, replications: list[list[_Row]]) -> None:
        self._save(_chunk_name(first), replications)

    def save_result(self, replications: pd.DataFrame) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pandas(replications, preserve_index=False)
        metadata = (table.schema.metadata or {}) | {b"qdq": self.spec.encode()}
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), buffer)
        _write(self.folder / "replications.parquet", buffer.getvalue())


def _chunk_name(first: int) -> str:
    return f"chunks/{first:08d}.json"


def _dump(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _write(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there as a whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    # Always the same temporary name: what a killed run leaves is overwritten by the next.
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _first_difference(there: Any, here: Any, name: str = "") -> str | None:
    """Say where two JSON values differ first, or return None."""
    if isinstance(there, dict) and isinstance(here, dict):
        parts = [(f"{name}.{key}" if name else key, key) for key in {**here, **there}]
        for path, key in parts:
            if key not in there or key not in here:
                return f"{path} is only {'here' if key in here else 'there'}"
            difference = _first_difference(there[key], here[key], path)
            if difference is not None:
                return difference
        return None
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for i, (left, right) in enumerate(zip(there, here, strict=True)):
            difference = _first_difference(left, right, f"{name}[{i}]")
            if difference is not None:
                return difference
        return None
    return None if there == here else f"{name} is {_short(there)} there and {_short(here)} here"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."


# --------------------------------------------------------------------------------------------------
# The result
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Study:
    """Replications of an experiment, as made by `run_study`.

    Attributes
    ----------
    scenario : Scenario
    designs : tuple of Design
    n_tasks, n_replications, seed : int
    level : float
        Confidence level of the intervals.
    truth : TrueEffect or float
        The global treatment effect that the estimates are compared with.
    replications : DataFrame
        A row an estimate, ordered by replication and then as `table`, with the columns
        ``replication, design, method, rule, horizon, normalise, queue, arrival_rate, variance,
        value, standard_error, degrees_of_freedom, low, high, alpha, n_used``; missing where they do
        not apply. Designs are written as their ``repr``, numbers among the arrival rates as text.
    settings : dict
        What was run, JSON-native where that is possible; with a store, what study.json holds.
    """

    scenario: Scenario
    designs: tuple[Design, ...]
    n_tasks: int
    n_replications: int
    seed: int
    level: float
    truth: TrueEffect | float
    replications: pd.DataFrame
    settings: dict[str, Any]

    @property
    def _truth(self) -> tuple[float, float]:
        if isinstance(self.truth, TrueEffect):
            return self.truth.value, self.truth.standard_error
        return self.truth, 0.0

    @cached_property
    def table(self) -> pd.DataFrame:
        """How each method does over the replications: a row a design, method and variant.

        Columns: ``design, method, rule, horizon, normalise, queue, arrival_rate, variance``, the
        horizon missing where a rule chose it, log by log; ``n_replications``, those that gave an
        estimate; ``mean`` of the estimates; ``bias``, their mean minus the truth; ``sd``, their
        standard deviation over replications; ``rmse``, the root of their mean squared distance from
        the truth; ``coverage``, the share of the intervals that hold the truth;
        ``mean_standard_error``; and after each of the first five the standard error of itself,
        ``mean_error`` to ``coverage_error``.

        Notes
        -----
        With R estimates x, their mean m and central moments c2, c4 (sums over R), the truth t and
        its standard error s:

        - mean: ``sd / sqrt(R)``; bias: ``sqrt(sd**2 / R + s**2)``.
        - sd: ``sqrt((c4 - sd**4 (R - 3) / (R - 1)) / R) / (2 sd)``, from the variance of a sample
          variance, which supposes no law.
        - rmse: ``sqrt(var((x - t)**2) / R + (2 bias s)**2) / (2 rmse)``.
        - coverage k / R: ``sqrt(k (R - k) / R + 1/4) / (R + 1)``, half the width of Wilson's
          interval of one standard error, which is not zero where all intervals hold the truth; to
          its square is added that of half the change of coverage between t - s and t + s.

        All rows share the truth and the replications, so their errors are not independent. To
        compare two rows, take the differences of their estimates replication by replication.
        """
        import pandas as pd

        rows = len(self.replications) // self.n_replications
        value, low, high, standard_error = (
            self.replications[name].to_numpy(dtype=np.float64).reshape(-1, rows).T
            for name in ("value", "low", "high", "standard_error")
        )
        statistics = [
            _statistics(value[k], low[k], high[k], standard_error[k], *self._truth)
            for k in range(rows)
        ]
        labels = self.replications.loc[: rows - 1, list(_LABELS)].copy()
        labels.loc[labels["rule"].notna(), "horizon"] = pd.NA  # it differs between replications
        return pd.concat([labels, pd.DataFrame(statistics)], axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Return what was run and the truth, JSON-native: for `provenance`."""
        value, error = self._truth
        method = self.truth.method if isinstance(self.truth, TrueEffect) else "given"
        truth = {"value": value, "standard_error": error, "method": method}
        return self.settings | {
            "n_replications": self.n_replications,
            "level": self.level,
            "truth": truth,
        }

    def _shown(self) -> tuple[str, pd.DataFrame]:
        """Return a headline, and the table with its errors rounded into its cells."""
        import pandas as pd

        table = self.table
        said = [f"{self.n_replications} replications of {self.n_tasks} tasks, seed {self.seed}"]
        said.append(f"true effect {_with_error(*self._truth)}")
        shown: dict[str, Any] = {}
        for name in _LABELS:
            values = table[name].dropna().unique()
            if len(values) > 1 or name in ("design", "method"):
                shown[name] = table[name].astype("object").where(table[name].notna(), "")
            elif len(values) == 1:
                said.append(f"{name} {values[0]}")
        counts = table["n_replications"]
        if (counts < self.n_replications).any():
            shown["n_replications"] = counts
        for name in ("bias", "sd", "rmse", "coverage"):
            pairs = zip(table[name], table[f"{name}_error"], strict=True)
            shown[name] = [_with_error(value, error) for value, error in pairs]
        shown["mean standard error"] = [f"{x:.3g}" for x in table["mean_standard_error"]]
        return "Study: " + ", ".join(said), pd.DataFrame(shown)

    def __repr__(self) -> str:
        headline, table = self._shown()
        return f"{headline}\n{table.to_string(index=False)}"

    def _repr_html_(self) -> str:
        headline, table = self._shown()
        return f"<p>{html.escape(headline)}</p>\n{table.to_html(index=False, border=0)}"


def _with_error(value: float, error: float) -> str:
    """Write a number with two digits of its error, and no more of its own."""
    if not (math.isfinite(error) and error > 0.0):
        return f"{value:.6g}"
    decimals = min(max(1 - math.floor(math.log10(error)), 0), 12)
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def _statistics(
    value: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    standard_error: NDArray[np.float64],
    truth: float,
    truth_error: float,
) -> dict[str, float]:
    """Return a row of `Study.table`; missing estimates are left out."""
    there = np.isfinite(value)
    value, low, high, standard_error = (x[there] for x in (value, low, high, standard_error))
    n = value.size
    names = ("mean", "bias", "sd", "rmse", "coverage")
    if n < 2:
        missing = {f"{name}{end}": math.nan for name in names for end in ("", "_error")}
        return {"n_replications": n} | missing | {"mean_standard_error": math.nan}

    def share(effect: float) -> float:
        return float(np.mean((low <= effect) & (effect <= high)))

    mean = float(np.mean(value))
    variance = float(np.var(value, ddof=1))
    sd = math.sqrt(variance)
    fourth = float(np.mean((value - mean) ** 4))
    # Never below zero but by rounding, as the fourth moment is at least the square of the second.
    of_variance = max(fourth - variance**2 * (n - 3) / (n - 1), 0.0) / n
    bias = mean - truth
    squares = (value - truth) ** 2
    rmse = math.sqrt(float(np.mean(squares)))
    of_square = float(np.var(squares, ddof=1)) / n + (2.0 * bias * truth_error) ** 2
    coverage = by_draw = by_truth = math.nan
    if np.isfinite(standard_error).all():
        coverage = share(truth)
        by_draw = math.sqrt(n * coverage * (1.0 - coverage) + 0.25) / (n + 1.0)
        by_truth = 0.5 * (share(truth + truth_error) - share(truth - truth_error))
    return {
        "n_replications": n,
        "mean": mean,
        "mean_error": sd / math.sqrt(n),
        "bias": bias,
        "bias_error": math.hypot(sd / math.sqrt(n), truth_error),
        "sd": sd,
        "sd_error": math.sqrt(of_variance) / (2.0 * sd) if sd > 0.0 else 0.0,
        "rmse": rmse,
        "rmse_error": math.sqrt(of_square) / (2.0 * rmse) if rmse > 0.0 else 0.0,
        "coverage": coverage,
        "coverage_error": math.hypot(by_draw, by_truth),
        "mean_standard_error": float(np.mean(standard_error)),
    }


def _frame(plan: _Plan, results: Sequence[list[_Row]], level: float) -> pd.DataFrame:
    """Return the replications as a tidy frame."""
    import pandas as pd

    numbers = np.array(results, dtype=np.float64).reshape(-1, len(_STORED))
    column = dict(zip(_STORED, numbers.T, strict=True))
    infinite = np.isnan(column["degrees_of_freedom"]) & np.isfinite(column["value"])
    column["degrees_of_freedom"][infinite] = math.inf
    of_interval = zip(
        column["value"], column["standard_error"], column["degrees_of_freedom"], strict=True
    )
    intervals = np.array([inference.confidence_interval(*row, level) for row in of_interval])
    column |= {"low": intervals[:, 0], "high": intervals[:, 1]}

    labels = plan.labels()
    frame: dict[str, Any] = {"replication": np.repeat(np.arange(len(results)), len(labels))}
    for name in _LABELS:
        values = [row[name] for row in labels] * len(results)
        frame[name] = pd.array(values, dtype="Int64") if name == "horizon" else values
    frame |= {name: column[name] for name in (*_STORED[:3], "low", "high", "alpha")}
    for name in ("n_used", "horizon"):  # the horizon of each replication, if a rule chose it
        frame[name] = pd.array(column[name], dtype="Float64").astype("Int64")
    return pd.DataFrame(frame)


# --------------------------------------------------------------------------------------------------
# Running
# --------------------------------------------------------------------------------------------------


def run_study(
    scenario: Scenario,
    n_tasks: int,
    n_replications: int,
    seed: int,
    n_jobs: int | None = 2,
    store: str | os.PathLike[str] | None = None,
    *,
    designs: Design | Sequence[Design] = (Bernoulli(0.5),),  # noqa: B008 (it is immutable)
    horizon: int | str | Sequence[int | str | None] | None = None,
    normalise: str | Sequence[str] = "group_means",
    queue: str | Sequence[str] = "in_system",
    arrival_rate: ArrivalRate | Sequence[ArrivalRate | None] | None = None,
    variance: str | Sequence[str] | None = None,
    washout: float = 0.0,
    level: float = 0.95,
    warm_up: float | None = None,
    truth: TrueEffect | float | None = None,
    progress: bool | None = None,
) -> Study:
    """Replicate an experiment, and compare the estimates with the true effect.

    Each replication simulates every design and applies every method that the design admits, to the
    same logs. `horizon`, `normalise`, `queue`, `arrival_rate` and `variance` also take several
    values: the methods that use them are then estimated in each combination.

    Parameters
    ----------
    scenario : Scenario
        The system and the two policies.
    n_tasks : int
        Tasks a log.
    n_replications : int
        Number of replications, >= 2.
    seed : int
        Seed of the study, >= 0; replication j has the seed ``(seed, j)`` in every design.
    n_jobs : int or None, default 2
        Number of threads, -1 for one a core, None for what `joblib.parallel_config` says. A
        backend set there is used in any case; a Dask cluster runs replications on all its cores,
        and n_jobs threads here find the truth. Results do not depend on it.
    store : path, optional
        Folder, made if need be, that keeps finished replications: the same study then goes on from
        there, after a kill too, or with more replications. Meant for one run at a time. It ends up
        with a file replications.parquet.
    designs : Design or sequence of Design, default (Bernoulli(0.5),)
        Bernoulli, Switchback or ServerSplit, none twice.
    horizon, normalise, queue, arrival_rate, variance
        As for `estimate`, or a sequence of such values, none twice. With service rates that differ,
        there is no dq_mixed of ``queue="waiting"``.
    washout : float, default 0.0
        Time dropped from the beginning of every switchback period, >= 0 and below each period.
    level : float, default 0.95
        Confidence level, strictly between 0 and 1.
    warm_up : float, optional
        As for `simulate`.
    truth : TrueEffect or float, optional
        The true effect; by default ``true_effect(scenario, seed=seed)``, whose random numbers are
        independent of those of the replications.
    progress : bool, optional
        Whether to show progress on stderr; by default if that is a terminal.

    Returns
    -------
    Study
        Its `table` holds bias, standard deviation, RMSE and coverage with Monte Carlo errors.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; if the store holds a study of other arguments (n_replications,
        n_jobs, level and truth may differ) or made by another source of this package; as
        `true_effect` and `simulate`.

    Warns
    -----
    UserWarning
        If periods of a switchback are few, replications have no estimate for want of periods, or
        a file of the store is damaged.

    Examples
    --------
    >>> import qdq
    >>> scenario = qdq.Scenario(n_servers=2, arrivals=qdq.Poisson(0.6),
    ...                         control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2))
    >>> study = qdq.run_study(scenario, n_tasks=2000, n_replications=20, seed=3)
    >>> study.table[["method", "bias", "sd"]].shape
    (4, 3)
    """
    plan = _checked_plan(
        scenario,
        n_tasks,
        seed,
        designs,
        horizon,
        normalise,
        queue,
        arrival_rate,
        variance,
        washout,
        warm_up,
    )
    right = "an integer >= 2 (a standard deviation needs two)"
    n_replications = validation.integer("n_replications", n_replications, right, at_least=2)
    level = validation.number("level", level, "strictly between 0 and 1", above=0.0, below=1.0)
    if n_jobs is not None:
        right = "a number of threads >= 1, -1 for one a core, or None"
        n_jobs = validation.integer("n_jobs", n_jobs, right, at_least=-1)
        if n_jobs == 0:
            raise validation.refuse("n_jobs", n_jobs, right)
    if progress is not None:
        progress = validation.boolean("progress", progress)
    if isinstance(truth, TrueEffect):
        if truth.scenario != scenario:
            raise ValueError("truth is of another scenario: it must be that of this one, or None")
    elif truth is not None:
        truth = validation.number("truth", truth, "a TrueEffect, a number or None")

    kept = None if store is None else _Store(Path(store), plan)
    if truth is None:
        truth = None if kept is None else kept.truth(scenario)
    if truth is None:
        with joblib.parallel_config("threading"):  # whose cores are ours, unlike a cluster's
            threads = joblib.effective_n_jobs(n_jobs)
        truth = true_effect(scenario, seed=plan.seed, n_jobs=threads, progress=progress)
        if kept is not None:
            kept.save_truth(truth)

    results = _run(plan, n_replications, n_jobs, kept, progress)
    frame = _frame(plan, results, level)
    if kept is not None:
        kept.save_result(frame)
    _warn_of_missing(frame, n_replications)
    return Study(
        scenario=scenario,
        designs=plan.designs,
        n_tasks=plan.n_tasks,
        n_replications=n_replications,
        seed=plan.seed,
        level=level,
        truth=truth,
        replications=frame,
        settings=_settings(plan),
    )


def replicate(
    scenario: Scenario,
    design: Design,
    n_tasks: int,
    seed: Seed,
    warm_up: float | None = None,
    *,
    horizon: int | str | Sequence[int | str | None] | None = None,
    normalise: str | Sequence[str] = "group_means",
    queue: str | Sequence[str] = "in_system",
    arrival_rate: ArrivalRate | Sequence[ArrivalRate | None] | None = None,
    variance: str | Sequence[str] | None = None,
    washout: float = 0.0,
    level: float = 0.95,
) -> pd.DataFrame:
    """Simulate an experiment and estimate its effect in one pass, without keeping its log.

    Memory does not grow with the number of tasks: it holds the servers, the tasks in the system and
    as many of the newest tasks as the longest window spans. Under processor sharing it holds, of
    each task, arrival, response time, arm and server, since the last departures are known last.

    Parameters
    ----------
    scenario, design, n_tasks, seed, warm_up
        As for `simulate`; the tasks are the same. The design is Bernoulli, Switchback or
        ServerSplit.
    horizon, normalise, queue, arrival_rate, variance, washout
        As for `run_study`: several values are estimated in each combination, of the same tasks.
    level : float, default 0.95
        Confidence level.

    Returns
    -------
    DataFrame
        A row a method and variant, with the columns of `estimate`, and up to rounding the values
        that ``estimate(simulate(...))`` gives.

    Raises
    ------
    TypeError, ValueError
        As `simulate` and `estimate`.

    Examples
    --------
    >>> import qdq
    >>> frame = qdq.replicate(qdq.Scenario(n_servers=4), qdq.Bernoulli(0.5), n_tasks=10_000,
    ...                       seed=1, horizon=[50, 100])
    >>> len(frame)
    7
    """
    if isinstance(design, (list, tuple)):
        raise TypeError(f"design={design!r} is not one design, such as Bernoulli(0.5)")
    plan = _checked_plan(
        scenario,
        n_tasks,
        0,
        design,
        horizon,
        normalise,
        queue,
        arrival_rate,
        variance,
        washout,
        warm_up,
    )
    level = validation.number("level", level, "strictly between 0 and 1", above=0.0, below=1.0)
    seed_sequence(seed)
    return estimators.frame_of(list(plan.estimates(design, seed, level)))


def _run(
    plan: _Plan,
    n_replications: int,
    n_jobs: int | None,
    kept: _Store | None,
    progress: bool | None,
) -> list[list[_Row]]:
    """Return the rows of each replication, running those that are not kept."""
    chunks: dict[int, list[list[_Row]]] = {}
    for first in range(0, n_replications, _CHUNK):
        chunks[first] = [] if kept is None else kept.chunk(first)
    todo = [
        (first, j)
        for first, chunk in chunks.items()
        for j in range(first + len(chunk), min(first + _CHUNK, n_replications))
    ]
    hidden = None if progress is None else not progress  # None: unless on a terminal
    done = n_replications - len(todo)
    bar = tqdm(desc="study", unit="replication", total=n_replications, initial=done, disable=hidden)
    with bar, warnings.catch_warnings():
        # Said once, by `_check_periods`, and not in each replication.
        warnings.filterwarnings("ignore", ".*standard error of switchback is rough", UserWarning)
        results = _results(plan, [j for _, j in todo], n_jobs)
        for (first, j), rows in zip(todo, results, strict=True):
            chunks[first].append(rows)
            bar.update()
            if kept is not None and j + 1 in (first + _CHUNK, n_replications):
                kept.save_chunk(first, chunks[first])
    return [rows for chunk in chunks.values() for rows in chunk][:n_replications]


def _results(plan: _Plan, todo: Sequence[int], n_jobs: int | None) -> Iterator[list[_Row]]:
    """Run replications in threads, or where the user has told joblib to; keep their order."""
    backend, _ = joblib.parallel.get_active_backend(prefer="threads")
    if hasattr(backend, "client"):  # joblib's Dask backend
        return _results_of_cluster(plan, todo, backend)
    parallel = joblib.Parallel(n_jobs, prefer="threads", return_as="generator")
    results: Iterator[list[_Row]] = parallel(joblib.delayed(plan.replicate)(j) for j in todo)
    return results


def _results_of_cluster(plan: _Plan, todo: Sequence[int], backend: Any) -> Iterator[list[_Row]]:
    """Do so on the cluster of joblib's Dask backend.

    The backend's client is asked for it: `joblib.Parallel` would send the plan with every task,
    and wait for ever for a task that Dask has given up.
    """
    client = backend.client
    options = {"pure": False} | backend.submit_kwargs
    # Fails on a worker without qdq, where Dask would try for ever to load the tasks.
    client.run(source_hash, workers=options.get("workers"))
    with warnings.catch_warnings():
        # A long trace is large, but is sent once. Tasks carry the name of this future; it is no
        # scattered data, which would be lost with the workers that have them.
        warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
        sent = client.submit(_same, plan, **options)
    futures = client.map(_replicate, todo, plan=sent, source=source_hash(), **options)
    try:
        # A study that is itself a task of the cluster leaves its worker to others meanwhile.
        with backend.retrieval_context():
            for future in futures:
                yield future.result()
    finally:
        client.cancel(futures)


def _same(plan: _Plan) -> _Plan:
    return plan


def _replicate(j: int, plan: _Plan, source: str) -> list[_Row]:
    """Run replication j on a worker, whose qdq may be another one."""
    if source != source_hash():
        raise RuntimeError(
            f"a worker has another source of qdq ({source_hash()}) than this study ({source}): "
            "install the same on all, since results of different sources must not be mixed"
        )
    return plan.replicate(j)


def _settings(plan: _Plan) -> dict[str, Any]:
    try:
        return plan.spec()
    except TypeError:  # a function of the user's
        return {f.name: repr(getattr(plan, f.name)) for f in fields(plan)}


def _warn_of_missing(frame: pd.DataFrame, n_replications: int) -> None:
    counts = frame.loc[frame["value"].isna(), "design"].value_counts(sort=False)
    for design, count in counts.items():
        warnings.warn(
            f"{count} of {n_replications} replications of {design} have less than 2 whole periods "
            "of an arm and give no estimate: the table leaves them out",
            UserWarning,
            stacklevel=3,
        )


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def _checked_plan(
    scenario: Scenario,
    n_tasks: int,
    seed: int,
    designs: Design | Sequence[Design],
    horizon: int | str | Sequence[int | str | None] | None,
    normalise: str | Sequence[str],
    queue: str | Sequence[str],
    arrival_rate: ArrivalRate | Sequence[ArrivalRate | None] | None,
    variance: str | Sequence[str] | None,
    washout: float,
    warm_up: float | None,
) -> _Plan:
    if not isinstance(scenario, Scenario):
        raise TypeError(f"scenario={scenario!r} is not a Scenario")
    n_tasks = validation.integer("n_tasks", n_tasks, "an integer >= 2", at_least=2)
    seed = validation.integer("seed", seed, "an integer >= 0", at_least=0)
    washout = validation.number("washout", washout, "a time >= 0", at_least=0.0)
    if warm_up is None:
        warm_up = scenario.default_warm_up
    warm_up = validation.number("warm_up", warm_up, "a time >= 0", at_least=0.0)

    chosen = _several("designs", designs)
    for design in chosen:
        if type(design) is Design or not isinstance(design, Design):
            raise TypeError(
                f"designs holds {design!r}: it must hold designs, such as Bernoulli(0.5)"
            )
        if isinstance(design, (AllControl, AllTreatment)):
            raise ValueError(
                f"designs holds {design!r}, which has one arm only: no method applies, and the "
                "truth is found by true_effect"
            )
        if isinstance(design, Switchback):
            _check_periods(scenario, design, n_tasks, washout)

    right = f"a number of arrivals >= 1 and below n_tasks={n_tasks}"
    horizons: list[int | str] = []
    for value in _several("horizon", horizon):
        value = estimators.check_horizon(value)
        if value is None:
            value = scenario.default_horizon
            if value >= n_tasks and any(isinstance(design, Bernoulli) for design in chosen):
                raise ValueError(
                    f"horizon=None means {value} for this scenario, and it must be below "
                    f"n_tasks={n_tasks}: give a horizon, or more tasks"
                )
        elif not isinstance(value, str) and value >= n_tasks:
            raise validation.refuse("horizon", value, right)
        horizons.append(value)
    normalisations = _several("normalise", normalise)
    for value in normalisations:
        estimators.check_choice("normalise", value, estimators.NORMALISATIONS)
    queues = _several("queue", queue)
    for value in queues:
        estimators.check_choice("queue", value, estimators.QUEUES)
        if value == "waiting":
            estimators.refuse_sharing(scenario)
    rates = []
    for value in _several("arrival_rate", arrival_rate):
        estimators.check_rate(value)
        if value is None:
            value = "scenario" if isinstance(scenario.arrivals, Periodic) else "estimated"
        elif not (callable(value) or isinstance(value, str)):
            value = float(value)
        if value == "scenario" and isinstance(scenario.arrivals, ArrivalTrace):
            raise validation.refuse(
                "arrival_rate", value, "another one: an ArrivalTrace has no rate in its scenario"
            )
        rates.append(value)
    variances = _several("variance", variance)
    for value in variances:
        if value is not None:
            estimators.check_choice("variance", value, estimators.VARIANCES)
    _refuse_repeated("variance", list(variances))
    _refuse_repeated("designs", list(chosen))
    _refuse_repeated("horizon", horizons)
    _refuse_repeated("normalise", list(normalisations))
    _refuse_repeated("queue", list(queues))
    _refuse_repeated("arrival_rate", [_rate_label(rate) for rate in rates])
    return _Plan(
        scenario=scenario,
        designs=chosen,
        n_tasks=n_tasks,
        seed=seed,
        horizon=tuple(horizons),
        normalise=normalisations,
        queue=queues,
        arrival_rate=tuple(rates),
        variance=variances,
        washout=washout,
        warm_up=warm_up,
    )


def _several(name: str, given: Any) -> tuple[Any, ...]:
    """Return a value, or a sequence of values, as a tuple."""
    values = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not values:
        raise ValueError(f"{name}={given!r} is empty: it must hold one value at least")
    return values


def _refuse_repeated(name: str, values: list[Any]) -> None:
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"{name} holds {value!r} twice: its values must differ")


def _check_periods(scenario: Scenario, design: Switchback, n_tasks: int, washout: float) -> None:
    if washout >= design.period:
        raise validation.refuse("washout", washout, f"below the period of {design!r}")
    # The last period is cut short by the end of the log.
    whole = math.ceil(n_tasks / scenario.total_arrival_rate / design.period) - 1
    if whole < 4:
        raise ValueError(
            f"{design!r} has about {max(whole, 0)} whole periods in n_tasks={n_tasks}: it needs 2 "
            "of each arm, so at least 4; give more tasks or a shorter period"
        )
    fewer = whole * min(design.propensity, 1.0 - design.propensity)
    if fewer < estimators.FEW_PERIODS:
        warnings.warn(
            f"{design!r} has about {fewer:.3g} whole periods of an arm in n_tasks={n_tasks}, and "
            f"its standard errors are rough: {estimators.FEW_PERIODS} of each arm are advised",
            UserWarning,
            stacklevel=4,
        )
