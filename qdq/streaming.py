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

from qdq import kernels

# Tasks to a chunk: their columns stay in the processor's second cache.
CHUNK = 1 << 14

# Blocks that an experiment is cut into: from half as many to as many, once there are enough tasks.
MOST_BLOCKS = 256


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


class Blocks:
    """Sums over blocks of consecutive units (tasks, windows or periods), arm by arm.

    All blocks but the last hold the same number of units, a power of two: when there are more
    than 256, neighbours are merged. So they depend on the number of units alone, not on whether it
    was known beforehand, and memory does not grow with it.

    Parameters
    ----------
    width : int
        Sums to a block and arm.
    units : int, default 0
        Units that will come, if that is known: it saves the merging.
    """

    def __init__(self, width: int, units: int = 0) -> None:
        self.length = 1
        while units > MOST_BLOCKS * self.length:
            self.length *= 2
        self.sums = np.zeros((MOST_BLOCKS, 2, width))

    def make_room(self, units: int) -> None:
        """Merge neighbours until so many units have room."""
        while units > MOST_BLOCKS * self.length:
            half = MOST_BLOCKS // 2
            self.sums[:half] = self.sums[0::2] + self.sums[1::2]
            self.sums[half:] = 0.0
            self.length *= 2


class Sums:
    """What the estimators need to know of the tasks seen so far.

    Parameters
    ----------
    first : int
        The first task that counts: earlier ones open no window and enter no mean.
    windows : collection of Window
        Truncated sums to take.
    means : bool
        Whether to take the sums that the arms' means need.
    present_until, present_start : ndarray of float64, shape (m,)
        Departure and start of service of the tasks in the system before the first arrival.
    rates_at : callable
        ``rates_at(rate, time)`` gives the arrival rate at times (n,), for the rates of `windows`.
    n_tasks : int, default 0
        Tasks that will come, if that is known: it saves some time.
    """

    def __init__(
        self,
        first: int,
        windows: Collection[Window],
        means: bool,
        present_until: NDArray[np.float64],
        present_start: NDArray[np.float64],
        rates_at: Callable[[Any, NDArray[np.float64]], NDArray[np.float64]],
        n_tasks: int = 0,
    ) -> None:
        self.n_seen = 0
        self.first_arrival = self.last_arrival = 0.0
        self._base = 0.0
        self._first = first
        self._rates_at = rates_at
        self._present = Present(present_until)
        self._waiting = Present(present_start)

        units = max(n_tasks - first, 0)
        self._origin: float | None = None
        self._means = Blocks(3, units) if means else None

        self._period_running = np.zeros(7)
        self._period_moments = np.zeros((2, 6))
        self._period_blocks = Blocks(2)
        self._n_periods = 0

        self._windows = list(dict.fromkeys(windows))
        self._running = {window: np.zeros(5) for window in self._windows}
        self._moments = {window: Blocks(6, units) for window in self._windows}
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
        if self._means is not None:
            self._add_means(chunk, response)
        if chunk.period is not None:
            self._add_periods(chunk, response)
        if self._windows:
            self._add_windows(chunk, response)
        if self.n_seen == 0:
            self.first_arrival = chunk.base + float(chunk.arrival[0])
        self.last_arrival = chunk.base + float(chunk.arrival[-1])
        self.n_seen += chunk.arrival.size

    def means(self) -> NDArray[np.float64]:
        """Return the sums of the tasks that count, block by block.

        Returns
        -------
        ndarray of float64, shape (B, 2, 3)
            A row an arm (0 control, 1 treatment): tasks; sums of their responses and of the squares
            of these, from all of which the same number was taken off.
        """
        assert self._means is not None
        return _filled(self._means.sums)

    def periods(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the sums of the whole periods of a switchback, all in all and block by block.

        From each response the same number was taken off.

        Returns
        -------
        moments : ndarray of float64, shape (2, 6)
            As `inference.clustered` takes them.
        blocks : ndarray of float64, shape (B, 2, 2)
            A row an arm: tasks, and their summed responses.
        """
        return self._period_moments, _filled(self._period_blocks.sums)

    def windows(self, window: Window, scale: float) -> NDArray[np.float64]:
        """Return the sums of both truncated sums, the queue's multiplied by `scale`, by block.

        Returns
        -------
        ndarray of float64, shape (B, 2, 6)
            A row an arm (0 control, 1 treatment): windows; summed response, summed queue; sums of
            squares of response and of queue, and of their products. From every truncated sum the
            same number was taken off, which `origin` returns.
        """
        return _filled(self._moments[window].sums) * (1.0, 1.0, scale, 1.0, scale**2, scale)

    def origin(self, window: Window, scale: float) -> NDArray[np.float64]:
        """Return what was taken off response and queue in `windows`."""
        return self._running[window][2:4] * (1.0, scale)

    def costs(self, chunk: Chunk, before: float) -> dict[Any, NDArray[np.float64]]:
        """Return what the queue's sums add up, task by task, for tasks that come next.

        Parameters
        ----------
        chunk : Chunk
        before : float
            The arrival before, counted as the chunk's.

        Returns
        -------
        dict of (queue, rate) to ndarray of float64, shape (m,)
        """
        found = self._found(chunk, before)
        costs = {}
        for queue, rate in self._costs:
            if queue is not None:
                cost = found[queue].astype(np.float64)
                if rate is not None:
                    cost /= self._rates_at(rate, chunk.base + chunk.arrival)
                costs[queue, rate] = cost
        return costs

    def _count_from(self, base: float) -> None:
        by = base - self._base
        if by != 0.0:
            self._base = base
            self._present.ends = self._present.ends - by
            self._waiting.ends = self._waiting.ends - by
            self._newest["arrival"][: self._held] -= by

    def _add_means(self, chunk: Chunk, response: NDArray[np.float64]) -> None:
        assert self._means is not None
        if self._origin is None:
            self._origin = float(response[0])
        begin, end = max(self.n_seen, self._first), self.n_seen + response.size
        blocks = self._means
        blocks.make_room(end - self._first)
        kernels.add_tasks(
            response,
            chunk.treated,
            begin - self._first,
            end - self._first,
            self._first - self.n_seen,
            self._origin,
            blocks.length,
            blocks.sums,
        )

    def _add_periods(self, chunk: Chunk, response: NDArray[np.float64]) -> None:
        closed = np.empty((response.size, 3))
        n, mixed = kernels.close_periods(
            response, chunk.treated, chunk.period, chunk.kept, self._period_running, closed
        )
        if mixed >= 0:
            raise ValueError(
                f"period {mixed} holds tasks of both arms: in a switchback each holds one"
            )
        arm = closed[:n, 0].astype(np.int64)
        c, s = closed[:n, 1], closed[:n, 2]
        np.add.at(
            self._period_moments, arm, np.column_stack((np.ones(n), c, s, c * c, s * s, c * s))
        )
        blocks = self._period_blocks
        blocks.make_room(self._n_periods + n)
        number = np.arange(self._n_periods, self._n_periods + n) // blocks.length
        np.add.at(blocks.sums, (number, arm), closed[:n, 1:])
        self._n_periods += n

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
        for which, cost in self.costs(chunk, float(before)).items():
            newest[which][new] = cost
        self._held += m
        oldest = self.n_seen + m - self._held  # number of the task at the beginning of `newest`
        for window in self._windows:
            blocks = self._moments[window]
            blocks.make_room(self.n_seen + m - self._first)
            begin = max(self.n_seen - window.horizon, self._first) - self._first
            end = self._held - window.horizon + oldest - self._first
            kernels.add_windows_to_blocks(
                newest["response"],
                newest[window.queue, window.rate],
                newest["arrival"],
                newest["treated"],
                begin,
                end,
                self._first - oldest,
                window.horizon,
                window.by_duration,
                self._running[window],
                blocks.length,
                blocks.sums,
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


def _filled(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the blocks that hold something."""
    return sums[: 1 + np.flatnonzero(sums[:, :, 0].any(axis=1)).max(initial=-1)].copy()
