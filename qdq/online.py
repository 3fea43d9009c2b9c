"""Estimates that are kept up to date while an experiment runs, one task after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qdq import estimators, validation
from qdq.designs import Bernoulli
from qdq.estimators import ArrivalRate, Call
from qdq.streaming import CHUNK, Chunk

if TYPE_CHECKING:
    import pandas as pd


class OnlineEstimator:
    """Estimates of a Bernoulli experiment from its tasks as they are done.

    Memory does not grow with the number of tasks: it holds the newest L of them, those that are
    done before an earlier one is, and the sums. After the same tasks `result` gives what `estimate`
    gives for their log, up to rounding, whatever pieces they came in.

    Parameters
    ----------
    horizon : int
        L, the number of arrivals that a window spans, >= 1.
    methods : sequence of str, optional
        Of ``"naive"``, ``"dq_response"``, ``"dq_queue"``, ``"dq_mixed"``; by default all four.
    normalise, arrival_rate, variance, level
        As for `estimate`; of the arrival rates, not ``"scenario"``.
    queue : {"in_system", "including_self", "time_average"}, default "in_system"
        As for `estimate`.
    propensity : float, optional
        Probability of treatment, for ``normalise="inverse_propensity"``.
    skip_tasks : int, default 0
        Tasks at the beginning that open no window and enter no mean, >= 0: those that came before
        the system, empty at first, had filled up.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Examples
    --------
    >>> import qdq
    >>> log = qdq.simulate(qdq.Scenario(n_servers=4), qdq.Bernoulli(0.5), n_tasks=5000, seed=1,
    ...                    warm_up=0.0)
    >>> online = qdq.OnlineEstimator(horizon=50)
    >>> for k in range(5000):
    ...     online.update(log.arrival[k], log.departure[k], log.treated[k])
    >>> online.n_tasks
    5000
    >>> frame = online.result()
    >>> bool(abs(frame.value[3] - qdq.dq_mixed(log, horizon=50).value) < 1e-9)
    True
    """

    def __init__(
        self,
        horizon: int,
        methods: Sequence[str] | None = None,
        *,
        normalise: str = "group_means",
        queue: str = "in_system",
        arrival_rate: ArrivalRate | None = None,
        variance: str | None = None,
        level: float = 0.95,
        propensity: float | None = None,
        skip_tasks: int = 0,
    ) -> None:
        right = "a number of arrivals >= 1"
        horizon = validation.integer("horizon", horizon, right, at_least=1)
        right = "a number of tasks >= 0"
        skip_tasks = validation.integer("skip_tasks", skip_tasks, right, at_least=0)
        if propensity is not None:
            right = "a probability strictly between 0 and 1, or None"
            propensity = validation.number("propensity", propensity, right, above=0.0, below=1.0)
        if queue == "waiting":
            raise validation.refuse("queue", queue, "another one: it needs the starts of service")
        if arrival_rate == "scenario":
            raise validation.refuse("arrival_rate", arrival_rate, "another one: there is none here")
        admitted = estimators.METHODS_OF[Bernoulli]
        if isinstance(methods, str):
            raise TypeError(f"methods={methods!r} is one name: methods must be a list of names")
        chosen = admitted if methods is None else tuple(methods)
        for name in chosen:
            estimators.check_choice("methods", name, admitted)
        self._level = validation.number(
            "level", level, "strictly between 0 and 1", above=0.0, below=1.0
        )
        estimators.check_variant(normalise, queue, arrival_rate, variance)
        if normalise == "inverse_propensity":
            estimators.check_propensity(propensity)
        self._propensity = propensity
        self._call = Call(chosen, horizon, normalise, queue, arrival_rate, variance=variance)
        self._sums = estimators.sums_of([self._call], 0, skip_tasks, np.empty((0, 3)), None)
        # Tasks in the order of arrival that are not in the sums yet.
        self._new: _Tasks = (np.empty(CHUNK), np.empty(CHUNK), np.empty(CHUNK, np.bool_))
        self._n_new = 0
        self._last_arrival = -math.inf
        # Tasks that are done before an earlier one is, by number.
        self._early: dict[int, tuple[float, float, bool]] = {}

    @property
    def n_tasks(self) -> int:
        """Tasks taken into account, in the order of arrival without a gap."""
        return self._sums.n_seen + self._n_new

    def update(
        self,
        arrival: ArrayLike,
        departure: ArrayLike,
        treated: ArrayLike,
        number: ArrayLike | None = None,
    ) -> None:
        """Add a task that is done, or several.

        Parameters
        ----------
        arrival, departure : float or array_like of float, shape (m,)
            Times, departures not before arrivals.
        treated : bool or array_like of bool, shape (m,)
            Whether treatment routed it; 0 and 1 will do.
        number : int or array_like of int, shape (m,), optional
            Place of each task in the order of arrival, 0 for the first one. Tasks may then come in
            any order, and wait here for those before them. By default tasks come in the order of
            arrival.

        Raises
        ------
        TypeError, ValueError
            If a value is wrong, tasks are not in the order of arrival, or a number came before;
            then none of these tasks is added.
        """
        tasks, early = _checked(arrival, departure, treated), self._early
        if number is not None:
            tasks, early = self._those_in_order(tasks, number)
        elif early:
            raise ValueError("number=None after tasks with numbers: go on giving them")
        times = tasks[0]
        if not times.size:
            self._early = early
            return
        before = np.concatenate(([self._last_arrival], times[:-1]))
        if (times < before).any():
            k = int(np.argmax(times < before))
            raise ValueError(
                f"arrival={times[k]:.17g} comes after one at {before[k]:.17g}: tasks must be in "
                "the order of arrival, or be given with their number in it"
            )
        self._early = early
        self._last_arrival = float(times[-1])
        done = 0
        while done < times.size:
            rows = min(CHUNK - self._n_new, times.size - done)
            for held, column in zip(self._new, tasks, strict=True):
                held[self._n_new : self._n_new + rows] = column[done : done + rows]
            done += rows
            self._n_new += rows
            if self._n_new == CHUNK:
                self._flush()

    def result(self) -> pd.DataFrame:
        """Return the estimates from the tasks so far.

        Returns
        -------
        DataFrame
            A row a method, with the columns of `estimate`.

        Raises
        ------
        ValueError
            If there are too few tasks yet.
        """
        if self.n_tasks < 2:
            raise ValueError(f"there are {self.n_tasks} tasks yet, too few for an estimate")
        self._flush()
        estimates = estimators.estimates_from(
            self._sums, self._call, None, self._propensity, self._level
        )
        return estimators.frame_of(estimates)

    def _those_in_order(
        self, tasks: _Tasks, number: ArrayLike
    ) -> tuple[_Tasks, dict[int, tuple[float, float, bool]]]:
        """Return the tasks before which none is missing any more, and those that still wait."""
        numbers = np.atleast_1d(number)
        if numbers.dtype.kind not in "iu" or numbers.shape != tasks[0].shape:
            raise TypeError(f"number={number!r} is not allowed: it must hold an integer a task")
        early = dict(self._early)
        rows = zip(*(column.tolist() for column in tasks), strict=True)
        for place, row in zip(numbers.tolist(), rows, strict=True):
            if place < self.n_tasks or place in early:
                raise ValueError(
                    f"number={place} came before, or is below 0: each task must have its own, "
                    "counted from 0"
                )
            early[place] = row
        ready: list[tuple[float, float, bool]] = []
        while self.n_tasks + len(ready) in early:
            ready.append(early.pop(self.n_tasks + len(ready)))
        in_order = _checked(*zip(*ready, strict=True)) if ready else tuple(x[:0] for x in tasks)
        return in_order, early

    def _flush(self) -> None:
        if self._n_new:
            arrival, departure, treated = (column[: self._n_new] for column in self._new)
            self._sums.add(Chunk(0.0, arrival, departure, treated))
            self._n_new = 0


_Tasks: TypeAlias = tuple[NDArray[Any], ...]


def _checked(arrival: ArrayLike, departure: ArrayLike, treated: ArrayLike) -> _Tasks:
    """Return the columns as arrays, or refuse them."""
    columns = [np.atleast_1d(column) for column in (arrival, departure, treated)]
    if columns[0].ndim != 1 or len({column.shape for column in columns}) != 1:
        raise ValueError(
            f"arrival, departure and treated have shapes {[column.shape for column in columns]}: "
            "they must be of one length"
        )
    for name, column in zip(("arrival", "departure"), columns[:2], strict=True):
        if column.dtype.kind not in "iuf":
            raise TypeError(f"{name}={column[0]!r} is not a number: {name} must be finite times")
        if not np.isfinite(column).all():
            wrong = column[~np.isfinite(column)][0]
            raise ValueError(f"{name}={wrong!r} is not allowed: {name} must be finite times")
    backward = columns[1] < columns[0]
    if backward.any():
        k = int(np.argmax(backward))
        raise ValueError(
            f"departure={columns[1][k]!r} is before the arrival, {columns[0][k]!r}: it must not be"
        )
    if columns[2].dtype.kind not in "biuf" or not ((columns[2] == 0) | (columns[2] == 1)).all():
        raise ValueError(f"treated={treated!r} is not allowed: it must be True or False, or 1 or 0")
    return (*(column.astype(np.float64) for column in columns[:2]), columns[2].astype(np.bool_))
