"""The log of one experiment: when each task came, when it left, and which policy routed it.

A `TaskLog` holds one row a task in order of arrival, as read-only arrays, with what is known of the
experiment (design, propensity, scenario, seed). It comes from `qdq.simulate`, from a data frame, or
from a file: CSV, Parquet or the log of an HAProxy load balancer. It is written to CSV and Parquet
and read back bit for bit.

Readers refuse what they cannot read and say where: the file, the line and the column.
"""

from __future__ import annotations

import datetime
import gzip
import html
import json
import os
import re
import uuid
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qdq import validation
from qdq.designs import Design, design_from_dict
from qdq.scenario import Scenario

# pandas and pyarrow are imported where they are used: together they would double the time of
# `import qdq`.
if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_NEEDED = ("arrival", "departure", "treated")
_VECTORS: dict[str, type] = {
    "arrival": np.float64,
    "departure": np.float64,
    "treated": np.bool_,
    "server": np.int32,
    "service_time": np.float64,
    "in_system": np.int64,
    "period": np.int64,
    "choice_control": np.int32,
    "choice_treatment": np.int32,
}
# Matrices are written as one column for each column of theirs, numbered from 0.
_MATRICES = {"candidates": "candidate_", "queue_lengths": "queue_length_"}
# What the columns hold, by the kind of their type.
_RIGHT = {"f": "a number", "i": "a whole number", "b": "0 or 1"}
_SERVER_INDICES = ("server", "choice_control", "choice_treatment", "candidates")
# What a cell of a CSV may hold for 1 and 0, and what may stand on either side of it.
_TRUE, _FALSE = ("1", "true", "True", "TRUE"), ("0", "false", "False", "FALSE")
_PADS = ("", " ", "\t")
_NUMBERED = re.compile(f"({'|'.join(_MATRICES.values())})(0|[1-9][0-9]*)")

# The first line of a CSV of ours, and the key of the metadata in a Parquet file or a frame of ours.
_MARK = "# qdq "
_KEY = "qdq"


# --------------------------------------------------------------------------------------------------
# Saying where something is wrong
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Where columns come from: names the place of a bad value."""

    name: str
    where: Callable[[int], str]  # row, from 0 -> "line 7"
    names: Mapping[str, str] = field(default_factory=dict)  # what the source calls our columns

    def refuse(self, row: int, column: str, what: str) -> ValueError:
        column = self.names.get(column, column)
        return ValueError(f"{self.name}, {self.where(row)}, column {column!r}: {what}")


def _first(bad: NDArray[np.bool_]) -> int | None:
    """Return the first row in which `bad` is true, or None."""
    rows = bad if bad.ndim == 1 else bad.any(axis=1)
    return int(np.argmax(rows)) if rows.any() else None


def _typed(source: _Source, name: str, values: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Return numbers as `dtype`, contiguous; refuse what `dtype` cannot hold exactly."""
    wanted = np.dtype(dtype)
    kinds = {"f": "iuf", "i": "iuf", "b": "biuf"}[wanted.kind]
    if values.dtype.kind not in kinds:
        raise TypeError(
            f"{source.name}, column {source.names.get(name, name)!r}: a value of type "
            f"{values.dtype} is not {_RIGHT[wanted.kind]}"
        )
    if values.dtype == wanted:
        return np.ascontiguousarray(values)
    with np.errstate(invalid="ignore"):  # NaN as a whole number: caught by the comparison below
        result = np.ascontiguousarray(values, dtype=wanted)
    if wanted.kind != "f":
        row = _first(result != values)
        if row is not None:
            what = f"{values[row].tolist()} is not {_RIGHT[wanted.kind]}"
            raise source.refuse(row, name, what + f" of type {wanted}" * (wanted.kind == "i"))
    return result


def _server_count(value: Any) -> int | None:
    if value is None:
        return None
    return validation.integer("n_servers", value, "a whole number >= 1, or None", at_least=1)


def _check(columns: Mapping[str, NDArray[Any]], source: _Source, n_servers: int | None) -> None:
    """Refuse values that no log can hold; the order of rows is not looked at."""
    arrival, departure = columns["arrival"], columns["departure"]
    for name in ("arrival", "departure", "service_time"):
        if name in columns:
            values = columns[name]
            # Extremes are NaN if any value is, and cost less than a mask of all.
            if not np.isfinite([values.min(initial=0.0), values.max(initial=0.0)]).all():
                first = int(np.argmin(np.isfinite(values)))
                raise source.refuse(first, name, f"{values[first]} is not finite")
    row = _first(departure < arrival)
    if row is not None:
        what = f"{departure[row].item()} is before the arrival, {arrival[row].item()}"
        raise source.refuse(row, "departure", what)
    for name in ("service_time", "in_system", "queue_lengths"):
        if name in columns:
            values = columns[name]
            row = _first(values < 0) if values.min(initial=0) < 0 else None
            if row is not None:
                raise source.refuse(row, name, f"{values[row].tolist()} must be at least 0")
    for name in _SERVER_INDICES:
        if name in columns:
            value = columns[name]
            most = np.inf if n_servers is None else n_servers - 1
            bad = value.min(initial=0) < 0 or value.max(initial=0) > most
            row = _first((value < 0) | (value > most)) if bad else None
            if row is not None:
                right = "at least 0" if n_servers is None else f"from 0 to {n_servers - 1}"
                raise source.refuse(row, name, f"{value[row].tolist()} must be {right}")


# --------------------------------------------------------------------------------------------------
# The log
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TaskLog:
    """The tasks of one experiment in order of arrival, and what is known of the experiment.

    Arrays are kept as read-only views of what is given (copied only to change their type). Servers
    are numbered from 0. Times share one unit; ties in arrival keep their order, which then counts
    as the order of arrival.

    Parameters
    ----------
    arrival : ndarray of float64, shape (n,)
        When each task arrived, nondecreasing.
    departure : ndarray of float64, shape (n,)
        When each task left, >= arrival.
    treated : ndarray of bool, shape (n,)
        Whether the treatment policy routed the task.
    server : ndarray of int32, shape (n,), optional
        The server that each task joined.
    service_time : ndarray of float64, shape (n,), optional
        Time in service, >= 0; what it would be alone at the server, where tasks share it.
    in_system : ndarray of int64, shape (n,), optional
        Tasks that came before and had not left at each arrival, those of a warm-up included.
    period : ndarray of int64, shape (n,), optional
        The switchback period of each task.
    choice_control, choice_treatment : ndarray of int32, shape (n,), optional
        The server that each policy chose, or would have chosen.
    candidates : ndarray of int32, shape (n, d), optional
        The servers sampled for each task, in order.
    queue_lengths : ndarray of int32, shape (n, N), optional
        Tasks at each server as the dispatcher saw them at each arrival.
    propensity : float, optional
        The known probability of treatment; 0 or 1 for a log of one arm. None: not known.
    design : Design, optional
        The design of the experiment. None: not known.
    n_servers : int, optional
        Number of servers, >= 1. None: not known.
    scenario : Scenario, optional
        What was simulated; None for logs from outside.
    seed : int or tuple of int, optional
        The seed of the simulation; None for logs from outside.
    warm_up : float, optional
        Time simulated before time 0, >= 0; None for logs from outside.
    skip : float, default 0.0
        Tasks that arrive less than this after the first open no window and enter no mean, but count
        as tasks in system. Must leave at least one task.
    carried_over : ndarray of float64, shape (m, 3), optional
        Tasks of the warm-up still in the system at time 0: server, start of service (where tasks
        share a server, when each joined it), departure.
        Empty by default: a log from outside is taken to start empty.
    time_unit : str, optional
        ``"s"`` for HAProxy logs; None for the file's own unit.

    Raises
    ------
    TypeError, ValueError
        If a column or a field is not as said; the task, the column and the value are named.

    Examples
    --------
    >>> log = TaskLog(arrival=[0.0, 0.5], departure=[1.0, 2.0], treated=[True, False])
    >>> log
    TaskLog(2 tasks over 0.5, 1 treated, 1 control)
    >>> log.response_time
    array([1. , 1.5])
    """

    arrival: NDArray[np.float64]
    departure: NDArray[np.float64]
    treated: NDArray[np.bool_]
    server: NDArray[np.int32] | None = None
    service_time: NDArray[np.float64] | None = None
    in_system: NDArray[np.int64] | None = None
    period: NDArray[np.int64] | None = None
    choice_control: NDArray[np.int32] | None = None
    choice_treatment: NDArray[np.int32] | None = None
    candidates: NDArray[np.int32] | None = None
    queue_lengths: NDArray[np.int32] | None = None
    propensity: float | None = None
    design: Design | None = None
    n_servers: int | None = None
    scenario: Scenario | None = None
    seed: int | tuple[int, ...] | None = None
    warm_up: float | None = None
    skip: float = 0.0
    carried_over: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))
    time_unit: str | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            if isinstance(value, np.ndarray):
                value = value.view()
                value.setflags(write=False)
            object.__setattr__(self, name, value)

        source = _Source("TaskLog", lambda row: f"task {row}")
        columns: dict[str, NDArray[Any]] = {}
        for name, dtype in {**_VECTORS, **dict.fromkeys(_MATRICES, np.int32)}.items():
            given = getattr(self, name)
            if given is None and name not in _NEEDED:
                continue
            values = np.asarray(given)
            n_axes = 2 if name in _MATRICES else 1
            if values.ndim != n_axes:
                raise ValueError(f"{name} has shape {values.shape}: it must have {n_axes} axes")
            if n_axes == 2 and values.shape[1] == 0:
                put(name, None)  # nothing that a file or a frame could hold
                continue
            columns[name] = _typed(source, name, values, dtype)
        n = columns["arrival"].size
        if n == 0:
            raise ValueError("arrival is empty: a log must hold at least one task")
        for name, values in columns.items():
            if len(values) != n:
                raise ValueError(f"{name} has {len(values)} rows: it must have {n}, as arrival has")
            put(name, values)

        put("n_servers", _server_count(self.n_servers))
        _check(columns, source, self.n_servers)
        row = _first(self.arrival[1:] < self.arrival[:-1])
        if row is not None:
            before, after = self.arrival[row : row + 2].tolist()
            what = f"{after} is before the arrival of the task before, {before}"
            raise source.refuse(row + 1, "arrival", what)
        seen = self.queue_lengths
        if seen is not None and self.n_servers is not None and seen.shape[1] != self.n_servers:
            right = f"one column for each of the {self.n_servers} servers"
            raise ValueError(f"queue_lengths has shape {seen.shape}: it must have {right}")
        self._check_fields(put)

    def _check_fields(self, put: Callable[[str, object], None]) -> None:
        if self.design is not None and not isinstance(self.design, Design):
            raise TypeError(
                f"design={self.design!r} is not a design such as Bernoulli(0.5), or None"
            )
        if self.scenario is not None and not isinstance(self.scenario, Scenario):
            raise TypeError(f"scenario={self.scenario!r} is not a Scenario, or None")
        if self.propensity is not None:
            share = validation.number(
                "propensity", self.propensity, "a probability, or None", at_least=0.0, at_most=1.0
            )
            put("propensity", share)
            one_arm = {0.0: not self.treated.any(), 1.0: bool(self.treated.all())}
            if not one_arm.get(share, True):
                right = "strictly between 0 and 1: the log has tasks of the other arm"
                raise validation.refuse("propensity", share, right)
            designed = getattr(self.design, "propensity", share)
            if designed != share:
                right = f"{designed!r}, as in {self.design!r}"
                raise validation.refuse("propensity", share, right)
        if self.seed is not None:
            whole = self.seed if isinstance(self.seed, tuple) else (self.seed,)
            right = "an int >= 0, a tuple of them, or None"
            ints = tuple(validation.integer("seed", s, right, at_least=0) for s in whole)
            put("seed", ints if isinstance(self.seed, tuple) else ints[0])
        if self.warm_up is not None:
            put(
                "warm_up", validation.number("warm_up", self.warm_up, ">= 0, or None", at_least=0.0)
            )
        put("skip", validation.number("skip", self.skip, "a time >= 0", at_least=0.0))
        if self.first_counted == self.n_tasks:
            raise validation.refuse("skip", self.skip, f"less than the log's span, {self._span}")
        carried = np.ascontiguousarray(self.carried_over, dtype=np.float64)
        if carried.ndim != 2 or carried.shape[1] != 3 or not np.isfinite(carried).all():
            right = "rows of server, start of service and departure, all finite"
            raise ValueError(f"carried_over has shape {carried.shape}: it must hold {right}")
        put("carried_over", carried)
        if self.time_unit is not None and not isinstance(self.time_unit, str):
            raise TypeError(f"time_unit={self.time_unit!r} is not a string, or None")

    def __setstate__(self, state: dict[str, Any]) -> None:
        for value in state.values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)  # numpy does not pickle that
        self.__dict__.update(state)

    @property
    def n_tasks(self) -> int:
        """Number of tasks."""
        return self.arrival.size

    @cached_property
    def response_time(self) -> NDArray[np.float64]:
        """Departure less arrival of each task, shape (n,)."""
        result = self.departure - self.arrival
        result.setflags(write=False)
        return result

    @property
    def first_counted(self) -> int:
        """Index of the first task that arrived at or after `skip`."""
        return int(np.searchsorted(self.arrival, self.arrival[0] + self.skip, side="left"))

    @property
    def _span(self) -> float:
        return float(self.arrival[-1] - self.arrival[0])

    def _facts(self) -> dict[str, str]:
        treated = int(np.count_nonzero(self.treated))
        facts = {
            "tasks": str(self.n_tasks),
            "span": f"{self._span:.6g}" + (f" {self.time_unit}" if self.time_unit else ""),
            "treated": str(treated),
            "control": str(self.n_tasks - treated),
        }
        for name in ("design", "propensity", "n_servers", "seed"):
            if getattr(self, name) is not None:
                facts[name] = repr(getattr(self, name))
        if self.skip:
            facts["skip"] = f"{self.skip:.6g}"
        return facts

    def __repr__(self) -> str:
        facts = self._facts()
        tasks, span, treated, control = (
            facts.pop(k) for k in ("tasks", "span", "treated", "control")
        )
        rest = "".join(f", {name}={value}" for name, value in facts.items())
        return f"TaskLog({tasks} tasks over {span}, {treated} treated, {control} control{rest})"

    def _repr_html_(self) -> str:
        facts = self._facts() | {"columns": ", ".join(self._columns())}
        rows = "".join(f"<tr><th>{k}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
        return f"<table><caption>TaskLog</caption>{rows}</table>"

    # ----------------------------------------------------------------------------------------------
    # Writing
    # ----------------------------------------------------------------------------------------------

    def _columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns that are there, by the names they have in a frame or a file."""
        columns = {name: getattr(self, name) for name in _VECTORS}
        for name, stem in _MATRICES.items():
            matrix = getattr(self, name)
            if matrix is not None:
                columns |= {f"{stem}{i}": matrix[:, i] for i in range(matrix.shape[1])}
        return {name: values for name, values in columns.items() if values is not None}

    def _fields_as_json(self) -> str:
        """Return what is known of the experiment as JSON; floats by `repr`, so exactly."""
        try:
            scenario = None if self.scenario is None else self.scenario.to_dict()
        except TypeError as error:
            warnings.warn(f"the scenario is left out: {error}", UserWarning, stacklevel=3)
            scenario = None
        spec = {
            "n_tasks": self.n_tasks,
            "propensity": self.propensity,
            "design": None if self.design is None else self.design.to_dict(),
            "n_servers": self.n_servers,
            "scenario": scenario,
            "seed": self.seed,
            "warm_up": self.warm_up,
            "skip": self.skip,
            "carried_over": self.carried_over.tolist(),
            "time_unit": self.time_unit,
        }
        return json.dumps(spec)

    def to_frame(self) -> pd.DataFrame:
        """Return the log as a data frame, one row a task.

        Candidates and queue lengths become numbered columns (``candidate_0``, ``queue_length_0``,
        ...). What is known of the experiment goes along in the frame's ``attrs``, where
        `from_frame` finds it.

        Returns
        -------
        DataFrame
            Columns that the log has, in a fixed order.

        Warns
        -----
        UserWarning
            If the scenario uses a UserPolicy, which cannot be written down: it is left out.
        """
        import pandas as pd

        frame = pd.DataFrame(self._columns())
        frame.attrs[_KEY] = self._fields_as_json()
        return frame

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the log to a file that `read` reads back bit for bit.

        The file appears whole or not at all: it is written beside its place and moved there.

        Parameters
        ----------
        path : path-like
            The suffix names the format: ``.csv``, ``.csv.gz`` or ``.parquet``. A CSV holds what is
            known of the experiment in a first line ``# qdq {...}``; read elsewhere, skip that line.

        Raises
        ------
        ValueError
            If the suffix is another.

        Warns
        -----
        UserWarning
            If the scenario uses a UserPolicy, which cannot be written down: it is left out.
        """
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet

        path = Path(path)
        if not path.name.endswith((".csv", ".csv.gz", ".parquet")):
            raise validation.refuse(
                "path", str(path), "a name that ends in .csv, .csv.gz or .parquet"
            )
        spec = self._fields_as_json()
        table = pa.table(self._columns())
        with _replacing(path) as scratch:
            if path.suffix == ".parquet":
                table = table.replace_schema_metadata({_KEY: spec})
                # Times hardly repeat, so a dictionary of them would only cost time.
                pa.parquet.write_table(table, scratch, compression="zstd", use_dictionary=False)
                return
            place = table.column_names.index("treated")
            table = table.set_column(place, "treated", table["treated"].cast(pa.int8()))
            text = pa.BufferOutputStream()
            text.write(f"{_MARK}{spec}\n{','.join(table.column_names)}\n".encode())
            pa.csv.write_csv(table, text, pa.csv.WriteOptions(include_header=False))
            data = text.getvalue().to_pybytes()
            # A time stamp of 0 keeps equal logs equal as files.
            scratch.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)

    # ----------------------------------------------------------------------------------------------
    # Reading
    # ----------------------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        format: str | None = None,
        skip: float = 0.0,
        propensity: float | None = None,
        n_servers: int | None = None,
    ) -> TaskLog:
        """Read a log from a file.

        Parameters
        ----------
        path : path-like
            The file. CSV and HAProxy logs may be compressed with gzip, whatever their names.
        format : {"csv", "parquet", "haproxy"}, optional
            None goes by the name: ``.csv``, ``.csv.gz``; ``.parquet``; ``.log``, ``.log.gz``
            (HAProxy).
        skip : float, default 0.0
            Tasks that arrive less than this after the first open no window and enter no mean, but
            count as tasks in system: a log from outside starts empty.
        propensity : float, optional
            The known probability of treatment.
        n_servers : int, optional
            Number of servers. A value given here takes the place of the one in a file of ours.

        Returns
        -------
        TaskLog
            Times of an HAProxy log are in seconds since its first arrival; others are as in the
            file.

        Raises
        ------
        ValueError
            If something cannot be read: missing or repeated columns, times that are not finite
            numbers, a departure before its arrival, `treated` other than 0 and 1, a row that
            repeats another, no rows, a compressed file that is cut short, bytes that are not text.
            The file, the line and the column are named.

        Warns
        -----
        UserWarning
            If rows were not in order of arrival and were sorted (not for HAProxy, which logs in
            order of completion); if requests without a response were left out of an HAProxy log; if
            a log from outside looks as if it had been cut while tasks were running (see Notes).

        Notes
        -----
        **CSV and Parquet** need the columns ``arrival``, ``departure`` and ``treated`` (0 or 1,
        true or false); the other columns of `TaskLog` are read if they are there and further ones
        are ignored. In CSV they are separated by commas and named in the first line.

        **HAProxy, key=value**: lines of fields ``name=value`` separated by spaces, the same fields
        in all lines. Needed: ``t`` and ``te`` (arrival and end, whole microseconds since 1970) and
        ``arm`` (1 treatment, 0 control). Used if there: ``srv`` (a name that ends in the server's
        number), ``svc`` (service time, seconds), ``a`` and ``b`` (two candidate servers) with
        ``la`` and ``lb`` (their loads): control joins a; treatment joins b if it is less loaded,
        else a.

        **HAProxy, HTTP log line** (``option httplog``), the arm in a captured request header: the
        first of the captured headers that holds 0, 1, control or treatment. The bracketed date is
        that of the request's first byte, TR later the request is complete and Ta after the first
        byte the response has been sent (configuration manual, 8.2.3 and 8.4). So arrival = date +
        TR and departure = date + Ta, and the response time Ta - TR = Tw + Tc + Tr + data transfer
        leaves out the client's own slowness. All in whole milliseconds of local time: a log should
        not span a change of the clock. Requests with a timer of -1, or that HAProxy answered
        itself, have no response time and are left out with a warning, so they are missing from the
        tasks in system too. Servers are numbered by name.

        Lines with the same arrival keep their order in the file. HAProxy writes in order of
        completion, and a first-come first-served server completes in order of arrival.

        **Was the log cut?** Of the tasks that arrived in the last max(response time) before a log
        was cut, only the fast ones are in it, so few overlap its last arrival: about sqrt(2 Q)
        where Q do on average, if the density of response times is 1/mean near 0, as it is for
        exponential ones. A warning is given where fewer do than 2 sqrt(2 Q) and than at 99 % of the
        arrivals in the log's second half. At most about 1 complete log in 50 is warned of
        needlessly; in small systems, and where no task is fast, a cut cannot be seen.
        """
        path = Path(path)
        readers = {"csv": _read_csv, "parquet": _read_parquet, "haproxy": _read_haproxy}
        kind = _format_of(path) if format is None else format
        if kind not in readers:
            raise validation.refuse("format", format, "one of csv, parquet, haproxy, or None")
        given = {"skip": skip or None, "propensity": propensity, "n_servers": n_servers}
        raw = readers[kind](path)
        log = _build(raw, given)
        if raw.known is None:
            _warn_if_cut(log, raw.source.name)
        return log

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        *,
        skip: float = 0.0,
        propensity: float | None = None,
        n_servers: int | None = None,
        design: Design | None = None,
        time_unit: str | None = None,
    ) -> TaskLog:
        """Make a log from a data frame, one row a task.

        Parameters
        ----------
        frame : DataFrame
            Needs the columns ``arrival``, ``departure`` and ``treated``; the other columns of
            `TaskLog` are taken if they are there, further ones are ignored. A frame that `to_frame`
            made brings along what was known of the experiment.
        skip : float, default 0.0
            Tasks that arrive less than this after the first open no window and enter no mean.
        propensity : float, optional
            The known probability of treatment; None takes the one of `design`.
        n_servers : int, optional
            Number of servers.
        design : Design, optional
            The design of the experiment.
        time_unit : str, optional
            Unit of the times. Values given here take the place of those that the frame brings
            along.

        Returns
        -------
        TaskLog

        Raises
        ------
        TypeError, ValueError
            As `read`, with the row (from 0) and the column named.

        Warns
        -----
        UserWarning
            If rows were not in order of arrival and were sorted.
        """
        import pandas as pd

        if not isinstance(frame, pd.DataFrame):
            raise TypeError(f"frame is a {type(frame).__name__}: it must be a pandas DataFrame")
        if propensity is None:
            propensity = getattr(design, "propensity", None)
        given = {
            "skip": skip or None,
            "propensity": propensity,
            "n_servers": n_servers,
            "design": design,
            "time_unit": time_unit,
        }
        return _build(_read_frame(frame), given)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a scratch file beside `path` that takes its place when the block ends well."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# From what was read to a log
# --------------------------------------------------------------------------------------------------


class _Raw(NamedTuple):
    """What a reader found."""

    source: _Source
    columns: dict[str, NDArray[Any]]  # by the names of TaskLog
    known: dict[str, Any] | None = None  # the fields of a log of ours; None: a log from outside
    haproxy: bool = False  # in seconds, and in order of completion: sort without a word


def _build(raw: _Raw, given: Mapping[str, Any]) -> TaskLog:
    """Check the columns, put the rows in order of arrival and add the fields; given ones win."""
    known = dict(raw.known or ({"time_unit": "s"} if raw.haproxy else {}))
    known |= {name: value for name, value in given.items() if value is not None}
    known["n_servers"] = _server_count(known.get("n_servers"))
    _check(raw.columns, raw.source, known["n_servers"])
    columns: dict[str, Any] = raw.columns
    if np.any(np.diff(columns["arrival"]) < 0):
        if not raw.haproxy:
            what = "the rows were not in order of arrival and were sorted"
            warnings.warn(f"{raw.source.name}: {what}", UserWarning, stacklevel=3)
        order = np.argsort(columns["arrival"], kind="stable")
        columns = {name: values[order] for name, values in columns.items()}
    return TaskLog(**columns, **known)


def _warn_if_cut(log: TaskLog, name: str) -> None:
    """Warn if hardly any task overlaps the last arrival; see the notes of `TaskLog.read`."""
    longest = log.response_time.max()
    end = np.searchsorted(log.arrival, log.arrival[-1] - longest)
    before = np.arange(log.n_tasks // 2, end)
    if before.size < 100:
        return
    left = np.searchsorted(np.sort(log.departure), log.arrival, side="right")
    in_system = np.arange(log.n_tasks) - left
    usual = np.quantile(in_system[before], 0.01)
    if in_system[-1] < min(usual, 2.0 * np.sqrt(2.0 * in_system[before].mean())):
        warnings.warn(
            f"{name} may have been cut while tasks were running: {max(in_system[-1], 0)} tasks "
            f"overlap the last arrival, and at 99 % of earlier arrivals {usual:.0f} or more do. If "
            f"so, drop the tasks that arrived in the last {longest:.6g} (the longest response "
            "time), of which slow ones are missing",
            UserWarning,
            stacklevel=3,
        )


def _fields_from_json(text: str, source: _Source, n_rows: int) -> dict[str, Any]:
    """Return the fields that `TaskLog._fields_as_json` wrote."""
    try:
        spec: dict[str, Any] = json.loads(text)
        n_tasks = spec.pop("n_tasks")
        if spec["design"] is not None:
            spec["design"] = design_from_dict(spec["design"])
        if spec["scenario"] is not None:
            spec["scenario"] = Scenario.from_dict(spec["scenario"])
        if isinstance(spec["seed"], list):
            spec["seed"] = tuple(spec["seed"])
        spec["carried_over"] = np.array(spec["carried_over"], dtype=np.float64).reshape(-1, 3)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{source.name}: the 'qdq' line or metadata on the experiment is damaged: {error}"
        ) from error
    names = {f.name for f in dataclass_fields(TaskLog)} - set(_VECTORS) - set(_MATRICES)
    if set(spec) != names:
        wrong = ", ".join(sorted(set(spec) ^ names))
        raise ValueError(
            f"{source.name}: the 'qdq' line or metadata lacks or should not have: {wrong}"
        )
    if n_tasks != n_rows:
        raise ValueError(
            f"{source.name} has {n_rows} rows and should have {n_tasks}: rows were lost or added "
            "(without its 'qdq' line, metadata or attrs it is read as a log from outside)"
        )
    return spec


def _wanted(names: Sequence[str], source: _Source) -> list[str]:
    """Return those of `names` that a log holds; refuse missing and repeated ones."""
    for name in _NEEDED:
        if name not in names:
            found = ", ".join(map(str, names)) or "none"
            raise ValueError(f"{source.name}: column {name!r} is missing; found {found}")
    wanted = [name for name in names if name in _VECTORS or _NUMBERED.fullmatch(str(name))]
    repeated = [name for name, times in Counter(wanted).items() if times > 1]
    if repeated:
        raise ValueError(f"{source.name}: column {repeated[0]!r} is there more than once")
    for stem in _MATRICES.values():
        numbers = {int(m[2]) for m in map(_NUMBERED.fullmatch, wanted) if m and m[1] == stem}
        for i in range(len(numbers)):
            if i not in numbers:
                raise ValueError(
                    f"{source.name}: column {stem}{i} is missing, and {stem}{max(numbers)} is not"
                )
    return wanted


def _dtype_of(column: str) -> type:
    return _VECTORS.get(column, np.int32)


def _columns_of(arrays: Mapping[str, pa.ChunkedArray], source: _Source) -> dict[str, NDArray[Any]]:
    """Return Arrow columns as columns of a TaskLog, matrices put together."""
    import pyarrow as pa

    flat: dict[str, NDArray[Any]] = {}
    for name, values in arrays.items():
        if values.null_count:
            row = int(np.argmax(values.is_null().to_numpy()))
            raise source.refuse(row, name, "is missing or not a number")
        kind = values.type
        if not (
            pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        ):
            hint = "; give times as numbers since the start" if pa.types.is_temporal(kind) else ""
            raise source.refuse(0, name, f"{values[0].as_py()!r} is not a number but {kind}{hint}")
        flat[name] = _typed(source, name, values.to_numpy(), _dtype_of(name))
    columns = {name: values for name, values in flat.items() if name in _VECTORS}
    for name, stem in _MATRICES.items():
        width = sum(column.startswith(stem) for column in flat)
        if width:
            columns[name] = np.stack([flat[f"{stem}{i}"] for i in range(width)], axis=1)
    return columns


def _refuse_repeated_rows(frame: pd.DataFrame, source: _Source) -> None:
    """Refuse a row that equals an earlier one in every column, also in those of no use here."""
    import pandas as pd

    tied = np.flatnonzero(frame["arrival"].duplicated(keep=False))
    rows = frame.iloc[tied].astype(str)  # columns of no use here may hold anything
    repeated = rows.duplicated()
    if repeated.any():
        second = int(np.argmax(repeated))
        keys = pd.util.hash_pandas_object(rows, index=False).to_numpy()
        first = int(np.argmax(keys == keys[second]))
        raise ValueError(
            f"{source.name}, {source.where(int(tied[second]))}: repeats "
            f"{source.where(int(tied[first]))} in every column; if they are two tasks, add a "
            "column that tells them apart"
        )


# --------------------------------------------------------------------------------------------------
# Data frames and Parquet
# --------------------------------------------------------------------------------------------------


def _read_frame(frame: pd.DataFrame) -> _Raw:
    import pyarrow as pa

    source = _Source("frame", lambda row: f"row {row}")
    wanted = _wanted(list(frame.columns), source)
    if len(frame) == 0:
        raise ValueError("frame has no rows")
    arrays = {}
    for name in wanted:
        try:
            arrays[name] = pa.chunked_array([pa.array(frame[name], from_pandas=True)])
        except pa.ArrowException:  # a column of Python objects of different types
            for row, value in enumerate(frame[name]):
                if not isinstance(value, (int, float, np.number, np.bool_)):
                    raise source.refuse(row, name, f"{value!r} is not a number") from None
            raise
    columns = _columns_of(arrays, source)
    if _KEY in frame.attrs:
        return _Raw(source, columns, _fields_from_json(frame.attrs[_KEY], source, len(frame)))
    _refuse_repeated_rows(frame, source)
    return _Raw(source, columns)


def _read_parquet(path: Path) -> _Raw:
    import pyarrow as pa
    import pyarrow.parquet

    source = _Source(str(path), lambda row: f"row {row}")
    with open(path, "rb") as file:
        try:
            table = pa.parquet.read_table(file)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is not a whole Parquet file: {error}") from error
    wanted = _wanted(table.column_names, source)
    if table.num_rows == 0:
        raise ValueError(f"{path} has no rows")
    columns = _columns_of({name: table[name] for name in wanted}, source)
    spec = (table.schema.metadata or {}).get(_KEY.encode())
    if spec is not None:
        return _Raw(source, columns, _fields_from_json(spec.decode(), source, table.num_rows))
    _refuse_repeated_rows(table.to_pandas(), source)
    return _Raw(source, columns)


# --------------------------------------------------------------------------------------------------
# Text files
# --------------------------------------------------------------------------------------------------


def _format_of(path: Path) -> str:
    stem = path.name.removesuffix(".gz")
    for suffix, kind in ((".csv", "csv"), (".log", "haproxy")):
        if stem.endswith(suffix):
            return kind
    if path.name.endswith(".parquet"):
        return "parquet"
    right = "a name that ends in .csv, .csv.gz, .parquet, .log or .log.gz, unless format is given"
    raise validation.refuse("path", str(path), right)


def _text(path: Path) -> str:
    """Return the text of a file, unpacked if it begins as a gzip file does; lines end in LF."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except EOFError as error:
            raise ValueError(f"{path} is cut short: the gzip file has no end") from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is a damaged gzip file: {error}") from error
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    try:
        text = data.decode()
        place = text.find("\0")
        junk = "a zero byte" if place >= 0 else None
    except UnicodeDecodeError as error:
        place, junk = error.start, f"byte 0x{data[error.start]:02x}"
        text = data.decode("latin-1")
    if junk:
        before = text[:place]
        line, column = before.count("\n") + 1, place - before.rfind("\n")
        raise ValueError(f"{path}, line {line}, column {column}: {junk} is not UTF-8 text")
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def _read_csv(path: Path) -> _Raw:
    import pyarrow as pa
    import pyarrow.csv

    lines = _text(path).split("\n")
    ours = lines[0].startswith(_MARK)
    head = next((i for i, line in enumerate(lines) if line and not (ours and i == 0)), 0)
    names = [name.strip().strip('"') for name in lines[head].split(",")]

    def where(row: int) -> str:
        """Return the line of a row, from 0: the reader passes over empty lines."""
        filled = (i for i, line in enumerate(lines, 1) if line and i > head + 1)
        return f"line {next(islice(filled, row, None))}"

    source = _Source(str(path), where)
    wanted = _wanted(names, source)
    ragged: list[ValueError] = []

    def note_ragged(row: Any) -> str:
        found, right = row.actual_columns, row.expected_columns
        what = f"has {found} columns, it must have {right}"
        ragged.append(ValueError(f"{path}, {where(row.number - 1)}: {what}"))
        return "error"

    rows = "\n".join(lines[head + 1 :]).encode()
    if not rows.strip():
        raise ValueError(f"{path} has no rows")

    def parse(types: Mapping[str, pa.DataType]) -> pa.Table:
        return pa.csv.read_csv(
            pa.BufferReader(rows),
            # In one thread, else rows would have no numbers.
            pa.csv.ReadOptions(use_threads=False, column_names=names),
            pa.csv.ParseOptions(invalid_row_handler=note_ragged),
            # Arrow strips spaces off numbers, but not off these.
            pa.csv.ConvertOptions(
                column_types=types,
                strings_can_be_null=False,
                true_values=[f"{a}{word}{b}" for word in _TRUE for a in _PADS for b in _PADS],
                false_values=[f"{a}{word}{b}" for word in _FALSE for a in _PADS for b in _PADS],
            ),
        )

    types = {name: pa.from_numpy_dtype(_dtype_of(name)) for name in wanted}
    as_text = dict.fromkeys(names, pa.string())
    try:
        table = parse(as_text | types)
    except pa.ArrowInvalid as error:
        if ragged:
            raise ragged[0] from error
        cells = parse(as_text)
        bad = [(_first_bad_cell(cells[name], kind), name) for name, kind in types.items()]
        row, name = min((row, name) for row, name in bad if row is not None)
        right = _RIGHT[np.dtype(_dtype_of(name)).kind]
        raise source.refuse(row, name, f"{cells[name][row].as_py()!r} is not {right}") from error
    columns = _columns_of({name: table[name] for name in wanted}, source)
    if ours:
        spec = lines[0].removeprefix(_MARK)
        return _Raw(source, columns, _fields_from_json(spec, source, table.num_rows))
    _refuse_repeated_rows(table.to_pandas(), source)
    return _Raw(source, columns)


def _first_bad_cell(cells: pa.ChunkedArray, kind: pa.DataType) -> int | None:
    """Return the first row whose text is not of a kind, or None."""
    import pyarrow as pa

    words = {f"{a}{word}{b}" for word in _TRUE + _FALSE for a in _PADS for b in _PADS}
    for row, cell in enumerate(cells):
        if pa.types.is_boolean(kind):
            if cell.as_py() not in words:
                return row
            continue
        try:
            pa.scalar(cell.as_py().strip()).cast(kind)
        except pa.ArrowInvalid:
            return row
    return None


# --------------------------------------------------------------------------------------------------
# HAProxy logs
# --------------------------------------------------------------------------------------------------

_HTTP = re.compile(
    r"\[(?P<day>\d\d/[A-Z][a-z]{2}/\d{4}):(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\.(?P<ms>\d{3})\]"
    r" \S+ (?P<backend>[^ /]+)/(?P<server>\S+)"  # frontend, backend, server
    r" (?P<TR>-?\d+)/(?P<Tw>-?\d+)/(?P<Tc>-?\d+)/(?P<Tr>-?\d+)/(?P<Ta>\+?\d+)"
    r" -?\d+ \+?\d+ .* \S{4}"  # status, bytes, cookies, termination state
    r" \d+/\d+/\d+/\d+/\+?\d+ \d+/\d+"  # connections and retries, queues
    r'(?: \{(?P<captured>[^}]*)\})?(?: \{[^}]*\})? "'
)
_ARMS = {"0": 0, "1": 1, "control": 0, "treatment": 1}
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_FIELD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(\S*)")


class _Lines(NamedTuple):
    """The lines of a text file that are not empty, and where they stand."""

    path: Path
    text: list[str]
    numbers: list[int]

    def where(self, row: int) -> str:
        return f"line {self.numbers[row]}"

    def extract(self, pattern: str, explain: Callable[[str], str]) -> dict[str, pa.Array]:
        """Return the pattern's named groups; `explain` says why a line does not fit."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = pc.extract_regex(pa.array(self.text), pattern=pattern)
        if found.null_count:
            row = int(np.argmax(found.is_null().to_numpy(zero_copy_only=False)))
            raise ValueError(f"{self.path}, {self.where(row)}: {explain(self.text[row])}")
        return {found.type[i].name: found.field(i) for i in range(found.type.num_fields)}

    def numbers_in(self, cells: pa.Array, column: str, kind: type) -> NDArray[Any]:
        """Return texts as numbers."""
        import pyarrow as pa

        try:
            return np.asarray(cells.cast(pa.from_numpy_dtype(kind)))
        except pa.ArrowInvalid as error:
            row = _first_bad_cell(cells, pa.from_numpy_dtype(kind))
            assert row is not None
            what = f"{cells[row].as_py()!r} is not {_RIGHT[np.dtype(kind).kind]}"
            raise _Source(str(self.path), self.where).refuse(row, column, what) from error


def _read_haproxy(path: Path) -> _Raw:
    text = _text(path).split("\n")
    numbers = [i for i, line in enumerate(text, 1) if line and not line.isspace()]
    lines = _Lines(path, [text[i - 1].rstrip() for i in numbers], numbers)
    first = lines.text[0]
    http = _HTTP.search(first)
    if http is None and not {"t", "te"} & {m[1] for m in _FIELD.finditer(first)}:
        raise ValueError(
            f"{path}, {lines.where(0)}: {first[:80]!r} is neither fields such as 't=... te=... "
            "arm=...' nor HAProxy's HTTP log line (option httplog)"
        )
    if len(set(lines.text)) < len(lines.text):
        seen: dict[str, int] = {}
        for row, line in enumerate(lines.text):
            if seen.setdefault(line, row) != row:
                raise ValueError(f"{path}, {lines.where(row)}: repeats {lines.where(seen[line])}")
    return _read_http_lines(lines) if http else _read_fields(lines)


def _seconds(
    start: NDArray[np.int64], end: NDArray[np.int64], ticks: float
) -> dict[str, NDArray[Any]]:
    """Return arrivals and departures in seconds since the first arrival."""
    zero = start.min()  # whole ticks are subtracted, so nothing is rounded before the division
    return {"arrival": (start - zero) / ticks, "departure": (end - zero) / ticks}


def _read_fields(lines: _Lines) -> _Raw:
    """Read lines of key=value fields."""
    names = [m[1] for m in _FIELD.finditer(lines.text[0])]
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(
            f"{lines.path}, {lines.where(0)}: field {repeated[0]!r} is there more than once"
        )
    for name in ("t", "te", "arm"):
        if name not in names:
            raise ValueError(f"{lines.path}, {lines.where(0)}: field {name!r} is missing")
    wanted = ("t", "te", "arm", "srv", "svc", "a", "b", "la", "lb")
    fields = (f"{name}=(?P<{name}>[^ ]*)" if name in wanted else f"{name}=[^ ]*" for name in names)
    # A text before the first field (as syslog puts there) is passed over.
    pattern = f"(?:^|^[^=]* ){' '.join(fields)}$"

    def explain(line: str) -> str:
        found = [m[1] for m in _FIELD.finditer(line)]
        missing = [name for name in names if name not in found]
        if missing:
            return f"field {missing[0]!r} is missing"
        right = " ".join(names)
        return f"the fields are not those of the first line: {' '.join(found)} instead of {right}"

    cells = lines.extract(pattern, explain)
    whole = {
        name: lines.numbers_in(cells[name], name, np.int64)
        for name in ("t", "te", "arm", "a", "b", "la", "lb")
        if name in cells
    }
    columns = _seconds(whole["t"], whole["te"], 1e6)
    ours = {
        "t": "arrival",
        "te": "departure",
        "arm": "treated",
        "srv": "server",
        "svc": "service_time",
    }
    source = _Source(
        str(lines.path), lines.where, {v: k for k, v in ours.items()} | {"candidates": "a, b"}
    )
    columns["treated"] = _typed(source, "treated", whole["arm"], np.bool_)
    if "srv" in cells:
        columns["server"] = _server_numbers(lines, cells["srv"])
    if "svc" in cells:
        columns["service_time"] = lines.numbers_in(cells["svc"], "svc", np.float64)
    if "a" in whole and "b" in whole:
        pair = np.stack([whole["a"], whole["b"]], axis=1)
        columns["candidates"] = _typed(source, "candidates", pair, np.int32)
        if "la" in whole and "lb" in whole:
            columns["choice_control"] = columns["candidates"][:, 0]
            columns["choice_treatment"] = np.where(
                whole["lb"] < whole["la"], *columns["candidates"].T[::-1]
            )
    return _Raw(source, columns, haproxy=True)


def _server_numbers(lines: _Lines, names: pa.Array) -> NDArray[np.int32]:
    """Return the numbers in which the servers' names end."""
    coded = names.dictionary_encode()
    index: NDArray[np.int32] = np.asarray(coded.indices)
    numbers = np.empty(len(coded.dictionary), dtype=np.int32)
    for i, name in enumerate(coded.dictionary.to_pylist()):
        digits = re.search(r"[0-9]{1,9}$", name)
        if digits is None:
            what = f"{name!r} must end in the server's number, as s0 does"
            raise _Source(str(lines.path), lines.where).refuse(
                int(np.argmax(index == i)), "srv", what
            )
        numbers[i] = int(digits[0])
    return numbers[index]


def _read_http_lines(lines: _Lines) -> _Raw:
    """Read HAProxy's own HTTP log lines, the arm in a captured request header."""

    def explain(line: str) -> str:
        return f"{line[:80]!r} is not an HAProxy HTTP log line as the first one is"

    cells = lines.extract(_HTTP.pattern, explain)
    source = _Source(
        str(lines.path), lines.where, {"treated": "captured request headers", "departure": "Ta"}
    )
    servers = cells["server"].to_pylist()
    timers = np.stack([lines.numbers_in(cells[n], n, np.int64) for n in ("TR", "Tw", "Tc", "Tr")])
    done = (timers >= 0).all(axis=0) & np.array([not name.startswith("<") for name in servers])
    rows = np.flatnonzero(done)
    if rows.size == 0:
        raise ValueError(
            f"{lines.path} has no request that a server answered: all were aborted or refused"
        )
    if rows.size < done.size:
        warnings.warn(
            f"{lines.path}: {done.size - rows.size} of {done.size} requests were left out: they "
            "were aborted or HAProxy answered them itself",
            UserWarning,
            stacklevel=4,
        )
    lines = _Lines(lines.path, [], [lines.numbers[row] for row in rows])
    cells = {name: values.take(rows) for name, values in cells.items()}
    source = _Source(source.name, lines.where, source.names)

    ta = cells["Ta"].to_pylist()
    early = next((row for row, value in enumerate(ta) if value.startswith("+")), None)
    if early is not None:
        what = f"{ta[early]!r} was logged before the response had ended (option logasap)"
        raise source.refuse(early, "Ta", what)
    arms = _arms(cells["captured"].to_pylist(), source)
    begin = _milliseconds(cells, source)
    start = begin + timers[0, rows]
    columns = _seconds(start, begin + lines.numbers_in(cells["Ta"], "Ta", np.int64), 1e3)
    names = [
        f"{b}/{s}"
        for b, s in zip(cells["backend"].to_pylist(), cells["server"].to_pylist(), strict=True)
    ]

    def natural(name: str) -> list[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]

    numbered = {name: i for i, name in enumerate(sorted(set(names), key=natural))}
    columns |= {
        "treated": arms,
        "server": np.array([numbered[name] for name in names], dtype=np.int32),
    }
    return _Raw(source, columns, haproxy=True)


def _arms(captured: list[str], source: _Source) -> NDArray[np.bool_]:
    """Return the arm in the first captured header that holds one, the same header in every line."""
    headers = [block.lower().split("|") for block in captured]
    place = next((i for i, value in enumerate(headers[0]) if value in _ARMS), None)
    right = "must hold the arm as 0, 1, control or treatment"
    if place is None:
        raise source.refuse(0, "treated", f"{{{captured[0]}}} {right}")
    arms = np.empty(len(headers), dtype=np.bool_)
    for row, values in enumerate(headers):
        arm = _ARMS.get(values[place]) if place < len(values) else None
        if arm is None:
            raise source.refuse(row, "treated", f"{{{captured[row]}}} {right} in field {place + 1}")
        arms[row] = arm
    return arms


def _milliseconds(cells: Mapping[str, pa.Array], source: _Source) -> NDArray[np.int64]:
    """Return the bracketed dates in milliseconds since some day."""
    coded = cells["day"].dictionary_encode()
    index: NDArray[np.int32] = np.asarray(coded.indices)
    days = np.empty(len(coded.dictionary), dtype=np.int64)
    for i, text in enumerate(coded.dictionary.to_pylist()):
        day, month, year = text.split("/")
        try:
            days[i] = datetime.date(int(year), _MONTHS.index(month) + 1, int(day)).toordinal()
        except ValueError:
            raise source.refuse(
                int(np.argmax(index == i)), "date", f"{text!r} is not a date"
            ) from None
    result = days[index]
    for name, size, largest in (
        ("hour", 24, 23),
        ("minute", 60, 59),
        ("second", 60, 60),
        ("ms", 1000, 999),
    ):
        part = np.array(cells[name].to_pylist(), dtype=np.int64)
        row = _first(part > largest)
        if row is not None:
            raise source.refuse(row, "date", f"the {name} is {part[row]}, at most {largest}")
        result = result * size + part
    return result
