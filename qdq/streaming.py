"""Sums over the tasks of an experiment, which come in chunks: all that the estimators ask of them.

Memory does not grow with the number of tasks. A chunk is forgotten once its tasks have been added,
but for the tasks still in the system and for as many of the newest as the longest window spans. An
experiment is fed from a log or straight from the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qdq import inference, kernels

# Tasks to a chunk: their columns stay in the processor's second cache.
CHUNK = 1 << 14


class Chunk(NamedTuple):
    """Consecutive tasks in order of arrival; times count from `base`."""

    base: float
    arrival: NDArray[np.float64]
    departure: NDArray[np.float64]
    treated: NDArray[np.bool_]
    start: NDArray[np.float64] | None = None
    """Start of service, where something asks for it."""
    in_system: NDArray[np.int64] | None = None
    """Tasks that each arrival finds, where they are known."""
    period: NDArray[np.int64] | None = None
    """Of a switchback."""
    kept: NDArray[np.bool_] | None = None
    """Tasks of a switchback that count."""


def start_by_service_time(
    arrival: NDArray[np.float64],
    departure: NDArray[np.float64],
    service_time: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the start of service of tasks whose service times are known."""
    start = departure - service_time
    # A task served at once starts at its arrival: rounding must not make it wait.
    rounding = 4.0 * np.finfo(np.float64).eps * np.abs(departure)
    return np.where(start - arrival <= rounding, arrival, start)


class Window(NamedTuple):
    """What truncated sums are to be taken of. Two that are equal are taken once."""

    horizon: int
    """L, the number of arrivals that a window spans."""
    queue: str | None
    """What the queue's sum adds up, as for `dq_queue`; None leaves it at zero."""
    rate: Any = None
    """What the tasks found are divided by, one by one, if by anything: asked of `rates_at`."""
    by_duration: bool = False
    """Whether the queue's sum is multiplied by the time that the window spans."""


class Present:
    """The earlier tasks that are still there, by when they end."""

    def __init__(self, ends: NDArray[np.float64]) -> None:
        self.ends = ends

    def meet(
        self, arrival: NDArray[np.float64], end: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], tuple[NDArray[Any], ...]]:
        """Let tasks arrive; return how many each finds, and who ends between which arrivals."""
        earlier = self.ends
        both = np.concatenate((earlier, end))
        index = kernels.next_arrival(arrival, both)
        ends_at, earlier_ends_at = index[earlier.size :], index[: earlier.size]
        found = kernels.tasks_in_system(ends_at, earlier_ends_at)
        self.ends = both[index == arrival.size]
        return found, (ends_at, earlier, earlier_ends_at)


class Sums:
    """What the estimators need to know of the tasks seen so far.

    Parameters
    ----------
    n_tasks : int
        Tasks that will come.
    first : int
        The first of them that counts: earlier ones open no window and enter no mean.
    windows : collection of Window
        Truncated sums to take.
    batches : bool
        Whether to take the sums of runs of tasks.
    present_until, present_start : ndarray of float64, shape (m,)
        Departure and start of service of the tasks in the system before the first arrival.
    rates_at : callable
        ``rates_at(rate, time)`` gives the arrival rate at times (n,), for the rates of `windows`.
    """

    def __init__(
        self,
        n_tasks: int,
        first: int,
        windows: Collection[Window],
        batches: bool,
        present_until: NDArray[np.float64],
        present_start: NDArray[np.float64],
        rates_at: Callable[[Any, NDArray[np.float64]], NDArray[np.float64]],
    ) -> None:
        self.n_seen = 0
        self.first_arrival = self.last_arrival = 0.0
        self._base = 0.0
        self._first = first
        self._rates_at = rates_at
        self._present = Present(present_until)
        self._waiting = Present(present_start)

        self.edges = inference.batch_edges(first, n_tasks) if batches else None
        runs = 0 if self.edges is None else self.edges.size - 1
        self.batch_counts = np.zeros((runs, 2), np.int64)
        self.batch_sums = np.zeros((runs, 2))

        self._period_running = np.zeros(7)
        self.period_moments = np.zeros((2, 6))

        self._windows = list(dict.fromkeys(windows))
        self._running = {window: np.zeros(5) for window in self._windows}
        self._moments = {window: np.zeros((2, 6)) for window in self._windows}
        # The newest tasks, as many as the longest window needs; once full, the rest is dropped.
        self._kept = max((window.horizon for window in self._windows), default=0) + 1
        room = self._kept + max(self._kept, 2 * CHUNK) if self._windows else 0
        self._costs = list(dict.fromkeys((w.queue, w.rate) for w in self._windows))
        self._newest: dict[Any, NDArray[Any]] = {
            name: np.zeros(room) for name in ("response", "arrival", *self._costs)
        }
        self._newest["treated"] = np.zeros(room, np.bool_)
        self._held = 0

    def add(self, chunk: Chunk) -> None:
        """Add the tasks that come next.

        Raises
        ------
        ValueError
            If a period of a switchback holds tasks of both arms.
        """
        self._count_from(chunk.base)
        response = chunk.departure - chunk.arrival
        if self.edges is not None:
            kernels.add_batches(
                response,
                chunk.treated,
                self.n_seen,
                self.edges,
                self.batch_counts,
                self.batch_sums,
            )
        if chunk.period is not None:
            mixed = kernels.add_periods(
                response,
                chunk.treated,
                chunk.period,
                chunk.kept,
                self._period_running,
                self.period_moments,
            )
            if mixed >= 0:
                raise ValueError(
                    f"period {mixed} holds tasks of both arms: in a switchback each holds one"
                )
        if self._windows:
            self._add_windows(chunk, response)
        if self.n_seen == 0:
            self.first_arrival = chunk.base + float(chunk.arrival[0])
        self.last_arrival = chunk.base + float(chunk.arrival[-1])
        self.n_seen += chunk.arrival.size

    def window_moments(self, window: Window, scale: float) -> NDArray[np.float64]:
        """Return the moments of both truncated sums, the queue's multiplied by `scale`.

        Returns
        -------
        ndarray of float64, shape (2, 6)
            A row an arm (0 control, 1 treatment): windows; mean response, mean queue; sums of
            squared deviations from the arm's mean of response and of queue; sum of their products.
            An empty arm has zeros.
        """
        origin = self._running[window][2:4]
        result = self._moments[window].copy()
        for arm in range(2):
            count, x, y = result[arm, :3]
            if count > 0.0:
                result[arm, 3:] -= (x * x / count, y * y / count, x * y / count)
                result[arm, 3:5] = np.maximum(result[arm, 3:5], 0.0)
                result[arm, 1:3] = origin + result[arm, 1:3] / count
        return result * (1.0, 1.0, scale, 1.0, scale**2, scale)

    def _count_from(self, base: float) -> None:
        by = base - self._base
        if by != 0.0:
            self._base = base
            self._present.ends = self._present.ends - by
            self._waiting.ends = self._waiting.ends - by
            self._newest["arrival"][: self._held] -= by

    def _add_windows(self, chunk: Chunk, response: NDArray[np.float64]) -> None:
        m = response.size
        newest = self._newest
        if self._held + m > newest["response"].size:
            for values in newest.values():
                values[: self._kept] = values[self._held - self._kept : self._held]
            self._held = self._kept
        before = newest["arrival"][self._held - 1] if self._held else chunk.arrival[0]
        new = slice(self._held, self._held + m)
        newest["response"][new] = response
        newest["arrival"][new] = chunk.arrival
        newest["treated"][new] = chunk.treated
        found = self._found(chunk, float(before))
        for queue, rate in self._costs:
            if queue is not None:
                cost = newest[queue, rate]
                cost[new] = found[queue]
                if rate is not None:
                    cost[new] /= self._rates_at(rate, chunk.base + chunk.arrival)
        self._held += m
        oldest = self.n_seen + m - self._held  # number of the task at the beginning of `newest`
        for window in self._windows:
            kernels.add_windows(
                newest["response"],
                newest[window.queue, window.rate],
                newest["arrival"],
                newest["treated"],
                max(self.n_seen - window.horizon, self._first) - oldest,
                self._held - window.horizon,
                window.horizon,
                window.by_duration,
                self._running[window],
                self._moments[window],
            )

    def _found(self, chunk: Chunk, before: float) -> dict[str, NDArray[Any]]:
        """Return what the windows ask for of the tasks that each arrival finds."""
        queues = {queue for queue, _ in self._costs}
        found: dict[str, NDArray[Any]] = {}
        known = chunk.in_system
        if "time_average" in queues or (known is None and queues & {"in_system", "including_self"}):
            counts, (ends_at, earlier, earlier_ends_at) = self._present.meet(
                chunk.arrival, chunk.departure
            )
            known = counts if known is None else known
            if "time_average" in queues:
                found["time_average"] = kernels.area_between_arrivals(
                    before,
                    chunk.arrival,
                    chunk.departure,
                    ends_at,
                    earlier,
                    earlier_ends_at,
                    counts,
                )
        if known is not None:
            found["in_system"] = known
            found["including_self"] = known + 1
        if "waiting" in queues:
            assert chunk.start is not None
            found["waiting"] = self._waiting.meet(chunk.arrival, chunk.start)[0]
        return found
