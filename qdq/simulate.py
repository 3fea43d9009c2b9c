"""Simulation: scenario, design and seed in, `TaskLog` out; and replay of a given log."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qdq import kernels, validation
from qdq.designs import AllControl, AllTreatment, Design, ServerSplit, Switchback
from qdq.policies import UserPolicy
from qdq.scenario import ArrivalTrace, Periodic, Scenario, ServiceTrace
from qdq.streaming import CHUNK, Chunk, Present, start_by_service_time
from qdq.tasklog import TaskLog

Seed = int | Sequence[int]

RECORDABLE = ("service_time", "in_system", "candidates", "choices", "queue_lengths")

# Child of a replication's seed that draws the servers of a split; 0, 1, ... are replications.
_SPLIT_STREAM = 2**32 - 1
# Tasks drawn at once: their draws stay in the processor's first caches.
_BLOCK = 1024
# So many arrivals after a log, and ten for each of its tasks, may come before its last task leaves.
_MOST_LATER = 10_000_000
# Later than all that happens, but before what never does.
_FOREVER = float(np.finfo(np.float64).max)
# About as many arrivals come before the base of the times moves on.
_ARRIVALS_TO_A_BASE = 1 << 18


def seed_sequence(seed: Seed) -> np.random.SeedSequence:
    """Return the SeedSequence of a replication.

    Parameters
    ----------
    seed : int or sequence of int
        An integer s >= 0 is replication 0 of ``SeedSequence(s)``; ``(s, j)`` is replication j, the
        one that ``SeedSequence(s).spawn(j + 1)[j]`` is.

    Raises
    ------
    TypeError, ValueError
        If it is neither.
    """
    right = "an integer >= 0, or a tuple (seed, replication) of them"
    if isinstance(seed, (str, bytes)) or (np.ndim(seed) > 0 and len(seed) == 0):  # type: ignore[arg-type]
        raise validation.refuse("seed", seed, right)
    parts = [seed, 0] if np.ndim(seed) == 0 else list(seed)  # type: ignore[arg-type]
    numbers = [validation.integer("seed", part, right, at_least=0) for part in parts]
    if len(numbers) == 1:
        numbers.append(0)
    return np.random.SeedSequence(numbers[0], spawn_key=tuple(numbers[1:]))


def _key(stream: np.random.SeedSequence) -> NDArray[np.uint32]:
    return stream.generate_state(2, np.uint32).astype(np.uint32)


def tie_uniforms(seed: Seed, n_tasks: int) -> NDArray[np.float64]:
    """Return the uniform numbers by which policies that look at every server break ties.

    Parameters
    ----------
    seed : int or sequence of int
        As for `simulate`.
    n_tasks : int
        How many, from task 0 on.

    Returns
    -------
    ndarray of float, shape (n_tasks,)
    """
    words = np.empty((4, n_tasks), np.uint64)
    uniforms = np.empty(n_tasks)
    kernels.draw_ties(
        _key(seed_sequence(seed)), 0, words[0], words[1], words[2], words[3], uniforms
    )
    return uniforms


@dataclass(frozen=True)
class _Engine:
    """A kernel's view of scenario and design, and the state that its runs move on."""

    system: kernels.System
    choose: tuple[Any, Any]
    block: int

    def started(
        self,
        state: Any,
        carried_over: NDArray[np.float64],
        n_tasks: int,
        columns: kernels.Record,
    ) -> tuple[NDArray[np.float64], Iterator[tuple[float, kernels.Record]]]:
        """Return who is there at time 0, all known of them, and `runs`."""
        return carried_over, self.runs(state, n_tasks, columns)

    def runs(
        self, state: kernels.State, n_tasks: int, columns: kernels.Record
    ) -> Iterator[tuple[float, kernels.Record]]:
        """Dispatch tasks 0, ..., n_tasks - 1; yield chunk by chunk the base and what was recorded.

        `columns` has room for all tasks, or else for one chunk, which is then used again and again.
        """
        whole = columns.arrival.size == n_tasks
        for start in range(0, n_tasks, CHUNK):
            stop = min(start + CHUNK, n_tasks)
            here = slice(start, stop) if whole else slice(0, stop - start)
            rows = kernels.Record._make(column[here] for column in columns)
            # Between chunks only, at the same tasks however the columns are kept.
            state = self._rebased(state, start)
            state = self.run(state, rows, start, stop)
            yield state.base, rows

    def _rebased(self, state: Any, task: int) -> Any:
        """Return the state before `task` with times from a later base, once they have grown.

        The base moves by a power of 2, or by whole periods of a rate, so that the times that still
        matter lose no digit; the others end at zero.
        """
        system = self.system
        if system.arrival_kind == kernels.ARRIVAL_TRACE:
            now = float(system.arrival_trace[task]) - state.base
        else:
            now = float(state.clock[0])
        grown = 2.0 ** math.ceil(math.log2(_ARRIVALS_TO_A_BASE * system.mean_gap))
        step = system.period if system.arrival_kind == kernels.PERIODIC else grown
        by = math.floor(now / step) * step
        if now < grown or by == 0.0:
            return state
        return self._moved(state, by)._replace(base=state.base + by, clock=state.clock - by)

    def run(self, state: Any, record: kernels.Record, start: int, stop: int) -> Any:
        """Dispatch tasks start, ..., stop - 1; return the state after them, with room as needed."""
        loop = self._loop(self.choose == (None, None))
        reached = start
        while True:
            rest = kernels.Record._make(column[reached - start :] for column in record)
            status, reached = loop(
                self.system, state, rest, reached, stop, self.block, *self.choose
            )
            if status == kernels.FINISHED:
                return state
            if status == kernels.BAD_CHOICE:
                raise ValueError(
                    f"the UserPolicy chose, for task {reached}, a server that is not among its "
                    "candidates: it must return one of the candidates"
                )
            state = self._with_more_room(state)

    def _loop(self, built_in: bool) -> Any:
        return kernels.run if built_in else kernels.run_with_user_policy

    def _moved(self, state: kernels.State, by: float) -> kernels.State:
        return _moved(state, by)

    def _with_more_room(self, state: kernels.State) -> kernels.State:
        """Return the same state with twice the room in whatever is full."""
        if state.pool_free[0] < 0:
            size = state.pool.size
            return state._replace(
                pool=np.append(state.pool, np.zeros(size)),
                pool_next=np.append(state.pool_next, np.append(np.arange(size + 1, 2 * size), -1)),
                pool_free=np.array([size]),
            )
        size = state.ring_time.size
        popped, pushed = state.ring
        order = np.arange(popped, pushed) % size  # all entries, oldest first: the ring is full

        def unrolled(values: NDArray[Any]) -> NDArray[Any]:
            return np.append(values[order], np.zeros(2 * size - order.size, values.dtype))

        return state._replace(
            ring=np.array([0, order.size]),
            ring_time=unrolled(state.ring_time),
            ring_server=unrolled(state.ring_server),
            ring_service=unrolled(state.ring_service),
            ring_departure=unrolled(state.ring_departure),
        )


@dataclass(frozen=True)
class _SharingEngine(_Engine):
    """The same for servers that share.

    A departure is known only when all have come that slow the task down, so a log is run as a
    whole, and on with the arrivals after it until its last task has left.
    """

    later: kernels.System | None
    """What those arrivals are drawn from; None: there are none."""

    def started(
        self,
        state: Any,
        carried_over: NDArray[np.float64],
        n_tasks: int,
        columns: kernels.Record,
    ) -> tuple[NDArray[np.float64], Iterator[tuple[float, kernels.Record]]]:
        """Run; return who is there at time 0, all known of them, and what was recorded by chunk."""
        n_before = len(carried_over)
        response = np.full(n_before + n_tasks, np.nan)
        state = state._replace(
            origin=-n_before, response=response, awaited=np.array([response.size])
        )
        chunks = []
        for start in range(0, n_tasks, CHUNK):
            stop = min(start + CHUNK, n_tasks)
            rows = kernels.Record._make(column[start:stop] for column in columns)
            state = self._rebased(state, start)
            state = self.run(state, rows, start, stop)
            chunks.append((state.base, rows))
        self._run_on(state, n_tasks)
        carried_over = carried_over.copy()
        carried_over[:, 2] = carried_over[:, 1] + response[:n_before]
        columns.departure[:] = columns.arrival
        columns.departure[:] += response[n_before:] + self.system.dispatch_delay
        return carried_over[carried_over[:, 2] > 0.0], iter(chunks)

    def _run_on(self, state: kernels.SharingState, n_tasks: int) -> None:
        """Let tasks n_tasks, n_tasks + 1, ... come until those before have left."""
        last = self.system.arrival_trace.size or n_tasks + _MOST_LATER + 10 * n_tasks
        if self.later is None:
            last = n_tasks
        rows = _record(_BLOCK, (), 0, 0)
        start = n_tasks
        while start < last and state.awaited[0] > 0:
            if start % CHUNK == 0:  # as in a longer log
                state = self._rebased(state, start)
            stop = min(start + _BLOCK, start - start % CHUNK + CHUNK, last)
            assert self.later is not None
            state = replace(self, system=self.later).run(state, rows, start, stop)
            kernels.let_pass(rows.arrival[stop - start - 1] - self.system.delay, state)
            start = stop
        if self.later is not None and not self.system.arrival_trace.size:
            if state.awaited[0] > 0:
                raise ValueError(
                    f"{state.awaited[0]} of n_tasks={n_tasks} tasks are still there after "
                    f"{last - n_tasks} later arrivals, under discipline='processor_sharing', which "
                    "needs a stable system: use a lower load"
                )
            return
        kernels.let_pass(_FOREVER, state)

    def warmed_up(self, n: int, clock: float) -> tuple[kernels.SharingState, NDArray[np.float64]]:
        """Return the state at time 0 after n tasks, and who may be there, departures not known."""
        state = self.empty(clock)
        rows = _record(min(n, CHUNK), (), 0, 0)
        for start in range(-n, 0, CHUNK):
            state = self.run(state, rows, start, min(start + CHUNK, 0))
        entries = np.flatnonzero(state.server >= 0)
        entries = entries[np.argsort(state.task[entries])]
        state.task[entries] = np.arange(-entries.size, 0)
        joined = state.joined[entries] + self.system.dispatch_delay
        there = np.column_stack((state.server[entries], joined, np.full(entries.size, np.nan)))
        return state._replace(clock=np.zeros(1)), there

    def empty(self, clock: float) -> kernels.SharingState:
        """Return empty servers."""
        n_servers = self.system.rates.size
        room = 2 * _BLOCK
        return kernels.SharingState(
            base=0.0,
            clock=np.array([clock]),
            pointer=np.zeros(2, np.int64),
            present=np.zeros(n_servers, np.int64),
            attained=np.zeros(n_servers),
            changed=np.zeros(n_servers),
            leaves_at=np.full(n_servers, np.inf),
            idle_at=np.full(n_servers, -np.inf),
            root=np.full(n_servers, -1),
            unseen=np.zeros(n_servers, np.int64),
            unseen_work=np.zeros(n_servers),
            task=np.zeros(room, np.int64),
            server=np.full(room, -1),
            joined=np.zeros(room),
            finish=np.zeros(room),
            left=np.full(room, -1),
            right=np.append(np.arange(1, room), -1),
            free=np.array([0, room]),
            pending=np.full(2, -1),
            origin=0,
            response=np.empty(0),
            awaited=np.zeros(1, np.int64),
        )

    def _loop(self, built_in: bool) -> Any:
        return kernels.run_sharing if built_in else kernels.run_sharing_with_user_policy

    def _moved(self, state: Any, by: float) -> Any:
        """Return the state with all times inside less by `by`."""
        times = ("changed", "leaves_at", "idle_at", "joined")
        return state._replace(**{name: getattr(state, name) - by for name in times})

    def _with_more_room(self, state: Any) -> Any:
        """Return the same state with room for twice as many tasks."""
        size = state.task.size
        doubled = {
            name: np.append(getattr(state, name), getattr(state, name))
            for name in ("task", "joined", "finish", "left")
        }
        return state._replace(
            **doubled,
            server=np.append(state.server, np.full(size, -1)),
            right=np.append(state.right, np.append(np.arange(size + 1, 2 * size), state.free[0])),
            free=np.array([size, state.free[1] + size]),
        )


def _propensity(design: Design | None) -> float | None:
    if isinstance(design, (AllControl, AllTreatment)):
        return float(isinstance(design, AllTreatment))
    return getattr(design, "propensity", None)


def _engine(
    scenario: Scenario,
    stream: np.random.SeedSequence,
    design: Design | None,
    *,
    treated: NDArray[np.bool_] | None = None,
    arrivals: NDArray[np.float64] | None = None,
    requirements: NDArray[np.float64] | None = None,
    candidates: NDArray[np.int32] | None = None,
    design_of_later: Design | None = None,
) -> tuple[_Engine, float | None]:
    """Return the engine, and the propensity of the design.

    `treated`, `arrivals`, `requirements` and `candidates` replace what the design and the scenario
    would draw; `design_of_later` is that of tasks after the log, if it is another.
    """
    n = scenario.n_servers
    shares = scenario.discipline == "processor_sharing"
    later = None
    if shares and arrivals is None and treated is not None:
        after, _ = _engine(scenario, stream, design_of_later)
        later = after.system
    policies = (scenario.control, scenario.treatment)
    members = np.tile(np.arange(n, dtype=np.int64), (2, 1))
    n_members = np.array([n, n], dtype=np.int64)
    propensity = _propensity(design)
    if isinstance(design, ServerSplit):
        child = np.random.SeedSequence(stream.entropy, spawn_key=(*stream.spawn_key, _SPLIT_STREAM))
        split = design.treated_servers(scenario, child)
        design.check_stable(scenario, split)
        for arm in (0, 1):
            mine = np.flatnonzero(split == bool(arm))
            n_members[arm] = mine.size
            members[arm, : mine.size] = mine
        # A task goes to a group in proportion to the group's capacity.
        propensity = float(np.sum(scenario.rates[split]) / np.sum(scenario.rates))

    d = np.array([policy.n_choices or 0 for policy in policies], dtype=np.int64)
    user = tuple(policy.function if isinstance(policy, UserPolicy) else None for policy in policies)
    depth = max([int(d.max())] + [int(n_members[a]) for a in (0, 1) if user[a] is not None])
    if candidates is not None:
        if candidates.shape[1] < depth:
            raise ValueError(
                f"the log has {candidates.shape[1]} candidates a task and the policies look at "
                f"{depth}: "
                "the log must have at least as many, or no column of them (then they are drawn)"
            )
        if candidates.min() < 0 or candidates.max() >= n:
            raise ValueError(
                f"candidates run from {candidates.min()} to {candidates.max()}: "
                f"they must be servers 0 to {n - 1}"
            )
    service = scenario.service
    arrival_process = scenario.arrivals
    from_outside = arrivals is not None
    if isinstance(arrival_process, ArrivalTrace) and arrivals is None:
        arrivals = np.asarray(arrival_process.times)
    if isinstance(service, ServiceTrace) and requirements is None:
        requirements = np.asarray(service.requirements)
    periodic = isinstance(arrival_process, Periodic)
    if arrivals is None:
        mean_gap = 1.0 / scenario.total_arrival_rate
    else:
        mean_gap = max(float(np.ptp(arrivals)) / len(arrivals), 1e-100)
    system = kernels.System(
        key=_key(stream),
        arrival_kind=(
            kernels.ARRIVAL_TRACE
            if arrivals is not None
            else kernels.PERIODIC
            if periodic
            else kernels.POISSON
        ),
        mean_gap=mean_gap,
        amplitude=arrival_process.amplitude if isinstance(arrival_process, Periodic) else 0.0,
        period=arrival_process.period if isinstance(arrival_process, Periodic) else 1.0,
        arrival_trace=_contiguous(arrivals, np.float64),
        service_kind=(
            getattr(kernels, service.kind) if requirements is None else kernels.SERVICE_TRACE
        ),
        service_a=service.kernel_parameters[0],
        service_b=service.kernel_parameters[1],
        service_trace=_contiguous(requirements, np.float64),
        rates=scenario.rates,
        slowness=1.0 / scenario.rates,
        delay=scenario.information_delay + scenario.dispatch_delay,
        dispatch_delay=scenario.dispatch_delay,
        counts_own_dispatches=scenario.counts_own_dispatches,
        policy=np.array([getattr(kernels, p.kind) for p in policies], dtype=np.int64),
        d=d,
        n_members=n_members,
        members=members,
        depth=depth,
        candidates=(
            np.zeros((0, 0), np.int32)
            if candidates is None
            else np.array(candidates[:, :depth], dtype=np.int32, order="C")
        ),
        assignment=(
            kernels.ASSIGN_AS_GIVEN
            if treated is not None
            else kernels.ASSIGN_BY_PERIOD
            if isinstance(design, Switchback)
            else kernels.ASSIGN_BY_TASK
        ),
        # A 32-bit draw below this means treatment.
        threshold=round((propensity or 0.0) * 2**32),
        switch_period=design.period if isinstance(design, Switchback) else 1.0,
        treated=_contiguous(treated, np.bool_),
        needs_ties=any(policy.n_choices is None for policy in policies),
    )
    # Candidates of a block fill at most a few megabytes, however many servers there are.
    block = max(16, min(_BLOCK, (1 << 19) // max(depth, 1)))
    # One function stands in both places: the kernel asks it only for the arms whose policy is the
    # user's, and is compiled once for either.
    choose = (user[0] or user[1], user[1] or user[0])
    if shares:
        if later is None and not from_outside:
            later = system
        return _SharingEngine(system, choose, block, later), propensity
    return _Engine(system, choose, block), propensity


def _contiguous(values: NDArray[Any] | None, dtype: Any) -> NDArray[Any]:
    # Copied: a read-only array has another type, for which the kernel would be compiled once more.
    return np.empty(0, dtype) if values is None else np.array(values, dtype=dtype)


def _empty_state(n_servers: int, clock: float, lead: float) -> kernels.State:
    room = 64
    return kernels.State(
        base=0.0,
        lead=lead,
        clock=np.array([clock]),
        lines=np.zeros((n_servers, 8)),
        overflow_count=np.zeros(n_servers, np.int64),
        overflow_head=np.zeros(n_servers, np.int64),
        overflow_tail=np.zeros(n_servers, np.int64),
        pool=np.zeros(room),
        pool_next=np.append(np.arange(1, room), -1),
        pool_free=np.zeros(1, np.int64),
        pointer=np.zeros(2, np.int64),
        ring=np.zeros(2, np.int64),
        ring_time=np.zeros(room),
        ring_server=np.zeros(room, np.int64),
        ring_service=np.zeros(room),
        ring_departure=np.zeros(room),
        unseen=np.zeros(n_servers, np.int64),
        unseen_work=np.zeros(n_servers),
        seen_departure=np.zeros(n_servers),
    )


def _state_with(
    engine: _Engine,
    base: float,
    arrival: NDArray[np.float64],
    departure: NDArray[np.float64],
    server: NDArray[np.int32],
    service_time: NDArray[np.float64],
) -> kernels.State:
    """Return the state at time `base` after some tasks, in order of arrival, at FCFS servers.

    They must be all that the dispatcher can still see: those that left later than the information
    delay before `base`.
    """
    system = engine.system
    n_servers, lead = system.rates.size, system.delay
    inside = departure - system.dispatch_delay - base + lead
    order = [np.flatnonzero(server == s) for s in range(n_servers)]
    older = np.concatenate([mine[:-8] for mine in order])
    unseen = np.flatnonzero(arrival - base + lead > 0.0) if system.delay > 0.0 else np.empty(0, int)
    room = 64
    while room <= max(older.size, unseen.size):
        room *= 2

    def padded(values: NDArray[Any]) -> NDArray[Any]:
        return np.append(values, np.zeros(room - values.size, values.dtype))

    state = _empty_state(n_servers, 0.0, lead)._replace(
        base=base,
        pool=padded(inside[older]),
        pool_next=np.append(np.arange(1, room), -1),
        pool_free=np.array([older.size]),
        ring=np.array([0, unseen.size]),
        ring_time=padded(arrival[unseen] - base + lead),
        ring_server=padded(server[unseen].astype(np.int64)),
        ring_service=padded(service_time[unseen]),
        ring_departure=padded(inside[unseen]),
        unseen=np.bincount(server[unseen], minlength=n_servers),
        unseen_work=np.bincount(server[unseen], service_time[unseen], minlength=n_servers).astype(
            np.float64
        ),
    )
    entry = 0
    for s, mine in enumerate(order):
        newest = inside[mine[-8:]]
        state.lines[s, : newest.size] = newest[::-1]
        seen = mine[: mine.size - state.unseen[s]]
        state.seen_departure[s] = inside[seen[-1]] if seen.size else 0.0
        many = max(mine.size - 8, 0)
        state.overflow_count[s] = many
        if many:
            state.overflow_head[s], state.overflow_tail[s] = entry, entry + many - 1
        entry += many
    return state


def _moved(state: kernels.State, by: float) -> kernels.State:
    """Return the state with all times inside less by `by`; those that are long past become 0."""
    times = ("lines", "pool", "ring_time", "ring_departure", "seen_departure")
    return state._replace(**{name: np.maximum(getattr(state, name) - by, 0.0) for name in times})


def _record(n: int, record: Collection[str], depth: int, n_servers: int) -> kernels.Record:
    def rows(name: str) -> int:
        return n if name in record else 0

    return kernels.Record(
        arrival=np.empty(n),
        departure=np.empty(n),
        treated=np.empty(n, np.bool_),
        server=np.empty(n, np.int32),
        service_time=np.empty(rows("service_time")),
        candidates=np.empty((rows("candidates"), depth), np.int32),
        choice=np.empty((rows("choices"), 2), np.int32),
        queue_lengths=np.empty((rows("queue_lengths"), n_servers), np.int32),
    )


def _warmed_up(engine: _Engine, warm_up: float) -> tuple[Any, NDArray[np.float64]]:
    """Return the state at time 0, and who is there: rows of server, start of service, departure.

    With servers that share, departures are not known, and some of the rows may have left.
    """
    system = engine.system
    n_servers = system.rates.size
    if system.arrival_kind == kernels.ARRIVAL_TRACE or warm_up == 0.0:
        state: Any = (
            engine.empty(0.0)
            if isinstance(engine, _SharingEngine)
            else _empty_state(n_servers, 0.0, system.delay)
        )
        if system.arrival_kind == kernels.ARRIVAL_TRACE:
            # A trace may begin before time 0, where times inside must not.
            state = state._replace(base=float(np.floor(system.arrival_trace[0])))
        return state, np.empty((0, 3))
    n, clock = kernels.warm_up_start(
        system.key,
        system.arrival_kind,
        system.mean_gap,
        system.amplitude,
        system.period,
        warm_up,
    )
    if isinstance(engine, _SharingEngine):
        return engine.warmed_up(n, clock)
    ahead = 2.0 * warm_up  # more than enough, so that rounding leaves no time below zero
    state = _empty_state(n_servers, clock, system.delay + ahead)
    present = []
    for start in range(-n, 0, CHUNK):
        stop = min(start + CHUNK, 0)
        record = _record(stop - start, ("service_time",), 0, 0)
        state = engine.run(state, record, start, stop)
        stays = record.departure > 0.0
        present.append(
            np.column_stack(
                (
                    record.server[stays],
                    record.departure[stays] - record.service_time[stays],
                    record.departure[stays],
                )
            )
        )
    state = _moved(state, ahead)._replace(lead=system.delay, clock=np.zeros(1))
    return state, np.concatenate(present) if present else np.empty((0, 3))


def _checked_record(record: Collection[str]) -> tuple[str, ...]:
    right = "among " + ", ".join(RECORDABLE)
    if not isinstance(record, Collection):
        raise TypeError(f"record={record!r} is not a collection of names: they must be {right}")
    names = (record,) if isinstance(record, str) else tuple(record)
    for name in names:
        if name not in RECORDABLE:
            raise validation.refuse("record", name, right)
    return tuple(name for name in RECORDABLE if name in names)


def _log(
    engine: _Engine,
    state: Any,
    carried_over: NDArray[np.float64],
    n_tasks: int,
    record: tuple[str, ...],
    **fields: Any,
) -> TaskLog:
    """Run tasks 0, ..., n_tasks - 1 and put what they leave into a TaskLog."""
    columns = _record(n_tasks, record, engine.system.depth, engine.system.rates.size)
    carried_over, runs = engine.started(state, carried_over, n_tasks, columns)
    in_system = np.empty(n_tasks if "in_system" in record else 0, np.int64)
    present = Present(carried_over[:, 2].copy())
    trace = engine.system.arrival_trace
    n = 0
    for base, rows in runs:
        here = slice(n, n + rows.arrival.size)
        if base != 0.0:
            rows.arrival[:] += base
            rows.departure[:] += base
        if trace.size:  # as it was given, without rounding
            rows.arrival[:] = trace[here]
            np.maximum(rows.departure, rows.arrival, out=rows.departure)
        if in_system.size:
            in_system[here] = present.meet(rows.arrival, rows.departure)[0]
        n = here.stop
    design = fields["design"]
    return TaskLog(
        arrival=columns.arrival,
        departure=columns.departure,
        treated=columns.treated,
        server=columns.server,
        service_time=columns.service_time if "service_time" in record else None,
        candidates=columns.candidates if "candidates" in record else None,
        choice_control=columns.choice[:, 0].copy() if "choices" in record else None,
        choice_treatment=columns.choice[:, 1].copy() if "choices" in record else None,
        queue_lengths=columns.queue_lengths if "queue_lengths" in record else None,
        period=(
            np.floor(columns.arrival / design.period).astype(np.int64)
            if isinstance(design, Switchback)
            else None
        ),
        in_system=in_system if in_system.size else None,
        carried_over=carried_over,
        **fields,
    )


def simulate(
    scenario: Scenario,
    design: Design,
    n_tasks: int,
    seed: Seed,
    warm_up: float | None = None,
    record: Collection[str] = (),
) -> TaskLog:
    """Simulate an experiment.

    Parameters
    ----------
    scenario : Scenario
        The system and the two policies.
    design : Design
        Who is routed by which policy: Bernoulli, Switchback, ServerSplit, AllControl or
        AllTreatment.
    n_tasks : int
        Number of tasks logged, >= 1; they are the first to arrive after time 0.
    seed : int or tuple of int
        ``s`` is short for ``(s, 0)``, replication 0 of seed s; ``(s, j)`` is replication j. The
        same seed gives the same numbers, and designs and policies share arrivals, requirements and
        candidates.
    warm_up : float, optional
        Time simulated before time 0 from an empty system, under the same design, in time units, >=
        0. By default ``scenario.default_warm_up``.
    record : collection of str, default ()
        Columns to keep beside arrival, departure, treated, server (and period under Switchback):
        any of "service_time", "in_system", "candidates", "choices", "queue_lengths". There are no
        candidates where neither policy samples servers.

    Returns
    -------
    TaskLog

    Raises
    ------
    TypeError, ValueError
        If an argument is out of its range, a trace is shorter than n_tasks, a group of a server
        split is unstable, or under processor sharing the tasks logged have not left after 10^7 and
        10 n_tasks later arrivals.

    Notes
    -----
    Inside, times are kept from a base that moves on about every 2^18 arrivals, so that choices and
    response times do not lose precision however long the run is. The log's columns count from time
    0: at a time of 1e9 they, and the response times taken from them, are rounded to 1e-7.
    `replicate` estimates without that rounding, and without keeping a log.

    Under processor sharing a task is slowed down by those that arrive after it. So tasks go on
    arriving after the last one logged, under the same design, until all that are logged have left;
    of an `ArrivalTrace` those that it still holds. (A `ServiceTrace` that has come to its end is
    drawn from at random.)

    Examples
    --------
    >>> import qdq
    >>> log = qdq.simulate(qdq.Scenario(n_servers=4), qdq.Bernoulli(0.5), n_tasks=1000, seed=1)
    >>> log.n_tasks
    1000
    """
    if not isinstance(scenario, Scenario):
        raise TypeError(f"scenario={scenario!r} is not a Scenario")
    if type(design) is Design or not isinstance(design, Design):
        raise TypeError(
            f"design={design!r} is not a design: design must be one, such as Bernoulli(0.5)"
        )
    names = _checked_record(record)
    if "choices" in names and isinstance(design, ServerSplit):
        raise ValueError(
            "record='choices' is not allowed under ServerSplit: each arm has servers of its own, "
            "so the other "
            "arm's choice for a task does not exist"
        )
    n_tasks = _checked_length(scenario, n_tasks)
    warm_up = _checked_warm_up(scenario, warm_up)
    engine, propensity = _engine(scenario, seed_sequence(seed), design)
    state, carried_over = _warmed_up(engine, warm_up)
    return _log(
        engine,
        state,
        carried_over,
        n_tasks,
        names,
        propensity=propensity,
        design=design,
        n_servers=scenario.n_servers,
        scenario=scenario,
        seed=_plain(seed),
        warm_up=warm_up,
    )


def stream(
    scenario: Scenario,
    design: Design,
    n_tasks: int,
    seed: Seed,
    warm_up: float,
    *,
    washout: float = 0.0,
    with_start: bool = False,
) -> tuple[NDArray[np.float64], float | None, Iterator[Chunk]]:
    """Simulate an experiment whose tasks are handed on in chunks and not kept.

    The tasks are those of `simulate` with the same arguments. Under processor sharing they are kept
    until the last of them has left, and handed on then.

    Parameters
    ----------
    scenario, design, n_tasks, seed, warm_up
        As for `simulate`.
    washout : float
        Of a switchback: tasks that arrive so soon after the beginning of a period are not kept.
    with_start : bool
        Whether chunks have the start of service.

    Returns
    -------
    carried_over : ndarray of float64, shape (m, 3)
        As in a TaskLog.
    propensity : float or None
        As in a TaskLog.
    chunks : iterator of Chunk
        Each valid until the next one is asked for.

    Raises
    ------
    TypeError, ValueError
        As `simulate`.
    """
    n_tasks = _checked_length(scenario, n_tasks)
    warm_up = _checked_warm_up(scenario, warm_up)
    engine, propensity = _engine(scenario, seed_sequence(seed), design)
    state, carried_over = _warmed_up(engine, warm_up)
    record = ("service_time",) if with_start else ()
    shares = isinstance(engine, _SharingEngine)
    columns = _record(n_tasks if shares else min(CHUNK, n_tasks), record, 0, 0)
    carried_over, runs = engine.started(state, carried_over, n_tasks, columns)

    def chunks() -> Iterator[Chunk]:
        for base, rows in runs:
            start = period = kept = None
            if with_start:
                start = start_by_service_time(rows.arrival, rows.departure, rows.service_time)
            if isinstance(design, Switchback):
                time = base + rows.arrival
                period = np.floor(time / design.period).astype(np.int64)
                kept = time - design.period * period >= washout
            yield Chunk(base, rows.arrival, rows.departure, rows.treated, start, None, period, kept)

    return carried_over, propensity, chunks()


def _plain(seed: Seed) -> int | tuple[int, ...]:
    return int(seed) if np.ndim(seed) == 0 else tuple(int(part) for part in seed)  # type: ignore[arg-type, union-attr]


def _checked_length(scenario: Scenario, n_tasks: int) -> int:
    n_tasks = validation.integer("n_tasks", n_tasks, "an integer >= 1", at_least=1)
    for trace in (
        getattr(scenario.arrivals, "times", None),
        getattr(scenario.service, "requirements", None),
    ):
        if trace is not None and n_tasks > len(trace):
            raise validation.refuse(
                "n_tasks", n_tasks, f"at most the length of the trace, {len(trace)}"
            )
    return n_tasks


def _checked_warm_up(scenario: Scenario, warm_up: float | None) -> float:
    if warm_up is None:
        warm_up = scenario.default_warm_up
    warm_up = validation.number("warm_up", warm_up, "a time >= 0", at_least=0.0)
    if isinstance(scenario.arrivals, ArrivalTrace) and warm_up > 0.0:
        raise validation.refuse("warm_up", warm_up, "0 for an ArrivalTrace, which starts empty")
    return warm_up


def replay(scenario: Scenario, log: TaskLog, treated: ArrayLike, seed: Seed = 0) -> TaskLog:
    """Send the tasks of a log through the system again, under another assignment or other policies.

    Arrivals, service requirements and candidates stay what they were.

    Parameters
    ----------
    scenario : Scenario
        The system and the two policies. For a simulated log only the policies may differ from the
        log's own scenario; for a log from outside, the arrivals and the service law of the scenario
        are not used.
    log : TaskLog
        A simulated log, whose draws and state at time 0 are made again from its scenario, design
        and seed; or a log from outside, which starts empty and needs the column server (a
        requirement is the service time, from the column or rebuilt by FCFS, times the server's
        rate).
    treated : array_like of bool, shape (n_tasks,), or bool
        Which tasks the treatment routes.
    seed : int or tuple of int, default 0
        For logs from outside: draws the candidates, unless the log has them, and breaks ties.

    Returns
    -------
    TaskLog
        With the optional columns that the log has (``period`` only with ``treated=log.treated``),
        and its `skip`. With ``treated=log.treated`` and the log's own scenario, a simulated log
        comes back bit for bit.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit the log, or the log's state at time 0 can't be made again: it is
        itself a replay of a log with a warm-up, or has lost its scenario.

    Notes
    -----
    Under processor sharing the arrivals after a simulated log are made again too. They follow the
    log's own design, or the one arm that `treated` leaves. After a log from outside nobody arrives:
    those who are there at its end have the servers to themselves. Such a log needs service_time.
    """
    if not isinstance(scenario, Scenario):
        raise TypeError(f"scenario={scenario!r} is not a Scenario")
    if not isinstance(log, TaskLog):
        raise TypeError(f"log={log!r} is not a TaskLog")
    arms = _checked_treated(treated, log.n_tasks)
    same = bool(np.array_equal(arms, log.treated))
    design: Design | None = log.design if same else None
    if not same and not arms.any():
        design = AllControl()
    elif arms.all() and not same:
        design = AllTreatment()
    propensity = log.propensity if same else _propensity(design)
    names = tuple(name for name in RECORDABLE if getattr(log, _COLUMN[name]) is not None)
    if log.scenario is not None and log.seed is not None:
        own: Scenario = log.scenario
        if scenario.replace(control=own.control, treatment=own.treatment) != own:
            raise ValueError(
                "scenario differs from the one that the log was simulated with in more than its "
                "policies: use log.scenario.replace(control=..., treatment=...)"
            )
        stream = seed_sequence(log.seed)
        before, _ = _engine(own, stream, log.design)
        state, carried_over = _warmed_up(before, float(log.warm_up or 0.0))
        split = isinstance(log.design, ServerSplit)
        later = log.design if design is None or split else design
        if later is None and scenario.discipline == "processor_sharing":
            raise ValueError(
                "the log's design is not known, so the arrivals after it, which processor sharing "
                "needs, can't be made again: it is itself a replay; replay the log that was "
                "simulated"
            )
        engine, _ = _engine(scenario, stream, log.design, treated=arms, design_of_later=later)
        fields: dict[str, Any] = {
            "scenario": scenario,
            "seed": log.seed,
            "warm_up": log.warm_up,
        }
    else:
        if log.carried_over.size:
            raise ValueError(
                f"the log begins with {len(log.carried_over)} tasks of a warm-up and has not both "
                "scenario and seed, so its state at time 0 can't be made again: give the scenario "
                "back to it, dataclasses.replace(log, scenario=...)"
            )
        if isinstance(log.design, ServerSplit):
            raise ValueError(
                f"the log is from outside and of design {log.design!r}: replay does not know the "
                "servers of each arm"
            )
        engine, _ = _engine(
            scenario,
            seed_sequence(seed),
            None,
            treated=arms,
            arrivals=log.arrival,
            requirements=_requirements(scenario, log),
            candidates=log.candidates,
        )
        state, carried_over = _warmed_up(engine, 0.0)
        fields = {}
    result = _log(
        engine,
        state,
        carried_over,
        log.n_tasks,
        names,
        propensity=propensity,
        design=design,
        n_servers=scenario.n_servers,
        skip=log.skip,
        time_unit=log.time_unit,
        **fields,
    )
    # The departures of those there at time 0 depend, if servers share, on who comes after them.
    known = slice(0, 2 if scenario.discipline == "processor_sharing" else 3)
    if not np.array_equal(result.carried_over[:, known], log.carried_over[:, known]):
        raise ValueError(
            "the log's state at time 0 can't be made again from its scenario, design and seed: "
            "it is itself a replay, or was changed; replay the log that was simulated"
        )
    # Periods from outside need not be counted from time 0.
    return replace(result, period=log.period) if same else result


def run_traces(
    scenario: Scenario,
    treated: NDArray[np.bool_],
    stream: np.random.SeedSequence,
    candidates: NDArray[np.int32] | None = None,
    before: TaskLog | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Send traces of arrivals and requirements through a system, and keep no log.

    Parameters
    ----------
    scenario : Scenario
        Whose arrivals are an ArrivalTrace, and its service a ServiceTrace no shorter.
    treated : ndarray of bool, shape (n,)
        Which tasks the treatment routes, one for each arrival; there may be more arrivals.
    stream : numpy.random.SeedSequence
        Draws the candidates, unless they are given, and breaks ties.
    candidates : ndarray of int32, shape (n, d), optional
        The servers sampled for each task, in order.
    before : TaskLog, optional
        Tasks that came before, with server and service_time, to FCFS servers with these delays. By
        default the system starts empty.

    Returns
    -------
    response : ndarray of float64, shape (n,)
    server : ndarray of int32, shape (n,)

    Raises
    ------
    ValueError
        If the candidates are too few for the policies, or no servers of the system.
    """
    engine, _ = _engine(scenario, stream, None, treated=treated, candidates=candidates)
    state, _ = _warmed_up(engine, 0.0)
    if before is not None:
        assert before.server is not None
        assert before.service_time is not None
        now = float(engine.system.arrival_trace[0])
        there = np.flatnonzero(before.departure > now - scenario.information_delay)
        state = _state_with(
            engine,
            now,
            before.arrival[there],
            before.departure[there],
            before.server[there],
            before.service_time[there],
        )
        for arm in (0, 1):  # of a round robin: the next server after that of the arm's last task
            mine = before.server[before.treated == bool(arm)]
            state.pointer[arm] = (mine[-1] + 1) % scenario.n_servers if mine.size else 0
    columns = _record(treated.size, (), 0, 0)
    for _ in engine.runs(state, treated.size, columns):
        pass
    return columns.departure - columns.arrival, columns.server


# The column that shows whether a log has what `record` names.
_COLUMN = {name: name for name in RECORDABLE} | {"choices": "choice_control"}


def _checked_treated(treated: ArrayLike, n_tasks: int) -> NDArray[np.bool_]:
    values = np.asarray(treated)
    if values.ndim == 0:
        values = np.full(n_tasks, values)
    if values.shape != (n_tasks,):
        raise ValueError(
            f"treated has shape {values.shape}: it must be ({n_tasks},), one entry a task"
        )
    if not np.isin(values, (0, 1)).all():
        raise ValueError("treated holds something else than 0 and 1 (or False and True)")
    return values.astype(np.bool_)


def _requirements(scenario: Scenario, log: TaskLog) -> NDArray[np.float64]:
    if log.server is None:
        raise ValueError(
            "the log has no column server: replay needs it to rebuild the service requirements"
        )
    if log.server.max() >= scenario.n_servers or log.server.min() < 0:
        raise ValueError(
            f"the log names servers {log.server.min()} to {log.server.max()}: "
            f"scenario.n_servers={scenario.n_servers} must cover them"
        )
    if log.service_time is not None:
        service_time = log.service_time
    elif scenario.discipline == "processor_sharing":
        raise ValueError(
            "the log has no column service_time: replay under discipline='processor_sharing' needs "
            "it, since service requirements are rebuilt by FCFS only"
        )
    else:
        idle = np.full(scenario.n_servers, -np.inf)
        service_time = log.departure - kernels.start_of_service(
            log.arrival, log.departure, log.server, scenario.dispatch_delay, idle
        )
        bad = np.flatnonzero(service_time < 0)
        if bad.size:
            raise ValueError(
                f"task {bad[0]} departs before the task ahead of it at server "
                f"{log.server[bad[0]]}: service times can be rebuilt from a FCFS log only"
            )
    requirements: NDArray[np.float64] = service_time * scenario.rates[log.server]
    return requirements
