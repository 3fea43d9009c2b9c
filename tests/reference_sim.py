"""A naive event-by-event simulator in plain Python: the second opinion on qdq's kernel.

It is written from the definition of the model alone and shares no code with the package: a heap of
events, a list of jobs per server, and a dispatcher that answers "what do I know at time t" by going
through the history of joins and departures up to ``t - information_delay``. It is slow on purpose;
nothing here is clever enough to be wrong in the same way as a kernel.

The draws are arguments of :func:`simulate_reference`, so a path can be compared task by task;
:func:`draw_tasks` makes independent ones from numpy's own generator, to compare means.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import qdq

# Events at the same time happen in this order: a departure at t has left at t, and a task that
# joins its server at t is there for a task that arrives at t after it.
DEPARTURE, JOIN, ARRIVAL = 0, 1, 2


@dataclass
class Job:
    """One task at one server; times that have not come yet are infinite."""

    task: int
    joined: float
    service_time: float
    start: float = math.inf
    departure: float = math.inf
    # Where the server shares: the time of each event there, the work the job had left then, and the
    # share of the server that it had from then on.
    progress: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass
class Server:
    """One server: its history of jobs in order of dispatch, and those in service or waiting for it.

    FCFS serves one job and lets the others wait. Sharing serves all, and counts its events, since
    each makes void what was foreseen of the next departure.
    """

    rate: float
    history: deque[Job] = field(default_factory=deque)
    waiting: deque[Job] = field(default_factory=deque)
    serving: Job | None = None
    sharing: list[Job] = field(default_factory=list)
    events: int = 0


@dataclass
class Arm:
    """A policy, the servers it may use (increasing), and its round-robin pointer into them."""

    policy: object
    servers: list[int]
    pointer: int = 0


@dataclass
class Draws:
    """What chance decides about n tasks.

    ``arrival`` (n,), ``requirement`` (n,), ``treated`` (n,), ordered ``candidates`` (n, d), and the
    uniform ``u`` (n,) that breaks ties among all servers.
    """

    arrival: np.ndarray
    requirement: np.ndarray
    treated: np.ndarray
    candidates: np.ndarray
    u: np.ndarray


@dataclass
class Path:
    """What became of n tasks; ``queue_lengths`` and ``work`` (n, N) are as the dispatcher saw them.

    ``choice_control`` and ``choice_treatment`` are the servers each policy would have chosen; in a
    server split the other arm's is -1, since its candidates are not drawn. ``in_system`` counts the
    earlier tasks that have not departed at each arrival, those on their way to a server included.
    """

    departure: np.ndarray
    server: np.ndarray
    service_time: np.ndarray
    start: np.ndarray
    in_system: np.ndarray
    queue_lengths: np.ndarray
    work: np.ndarray
    choice_control: np.ndarray
    choice_treatment: np.ndarray


def seen_jobs(server: Server, now: float, delay: float) -> list[Job]:
    """Jobs that had joined and not left the server by ``now - delay``."""
    return [job for job in server.history if job.joined <= now - delay < job.departure]


def unseen_jobs(server: Server, now: float, delay: float) -> list[Job]:
    """Jobs already dispatched to the server whose joining is not seen yet."""
    return [job for job in server.history if job.joined > now - delay]


def remaining_work(job: Job, time: float) -> float:
    """Service time that a job present at ``time`` still needs."""
    if job.progress:
        then, left, share = next(row for row in reversed(job.progress) if row[0] <= time)
        return left - (time - then) * share
    if job.start <= time:
        return job.start + job.service_time - time
    return job.service_time


def pick(tied: Sequence[int], u: float) -> int:
    """The floor(u * m)-th of m tied servers."""
    return tied[math.floor(u * len(tied))]


def first_least(candidates: Sequence[int], cost: Callable[[int], float]) -> int:
    """The first of the candidates, in their order, that has the least cost."""
    least = min(cost(server) for server in candidates)
    return next(server for server in candidates if cost(server) == least)


def choose(
    arm: Arm,
    queue_lengths: Sequence[int],
    work: Sequence[float],
    rates: Sequence[float],
    candidates: Sequence[int],
    u: float,
) -> int:
    """The server to which the arm's policy sends a task, given what the dispatcher sees."""

    def all_least(values: Sequence[float]) -> list[int]:
        least = min(values[i] for i in arm.servers)
        return [i for i in arm.servers if values[i] == least]

    match arm.policy:
        # First, because ShortestExpectedDelay is also a PowerOfD.
        case qdq.ShortestExpectedDelay(d=d):
            return first_least(candidates[:d], lambda i: (queue_lengths[i] + 1) / rates[i])
        case qdq.PowerOfD(d=d):
            return first_least(candidates[:d], lambda i: queue_lengths[i])
        case qdq.JoinShortestQueue():
            return pick(all_least(queue_lengths), u)
        case qdq.LeastWorkLeft():
            return pick(all_least(work), u)
        case qdq.JoinIdleQueue():
            idle = [i for i in arm.servers if queue_lengths[i] == 0]
            return pick(idle or arm.servers, u)
        case qdq.RoundRobin():
            return arm.servers[arm.pointer]
        case qdq.UserPolicy(function=function):
            plain = getattr(function, "py_func", function)
            seen = np.array(queue_lengths), np.array(work), np.array(rates)
            return int(plain(*seen, np.array(candidates[: len(arm.servers)]), u))
    raise TypeError(f"unknown policy {arm.policy!r}")


def simulate_reference(
    scenario: qdq.Scenario,
    draws: Draws,
    groups: tuple[Sequence[int], Sequence[int]] | None = None,
    present: Sequence[tuple[int, float, float]] = (),
) -> Path:
    """Simulate the tasks of ``draws`` event by event.

    Parameters
    ----------
    scenario : qdq.Scenario
        Servers, rates, delays and policies; its arrivals and service law are not looked at.
    draws : Draws
        Arrivals (nondecreasing), requirements, arms, candidates and uniforms.
    groups : pair of sequences of int, optional
        The control's and the treatment's servers in a server split; by default all for both.
    present : sequence of (server, start of service, departure), optional
        Tasks in the system before the first arrival, in order of joining. The dispatcher takes them
        to have joined long ago, so this is right only without delays. Where servers share, of each
        departure less start is the service that it still needs at time 0.
    """
    shares = scenario.discipline == "processor_sharing"
    n_servers = scenario.n_servers
    n = len(draws.arrival)
    rates = [float(rate) for rate in np.broadcast_to(scenario.service_rates, n_servers)]
    a, b = scenario.information_delay, scenario.dispatch_delay
    everyone = list(range(n_servers))
    control_servers, treatment_servers = groups if groups is not None else (everyone, everyone)
    arms = (
        Arm(scenario.control, sorted(control_servers)),
        Arm(scenario.treatment, sorted(treatment_servers)),
    )
    servers = [Server(rate) for rate in rates]
    path = Path(
        departure=np.full(n, np.nan),
        server=np.full(n, -1),
        service_time=np.full(n, np.nan),
        start=np.full(n, np.nan),
        in_system=np.full(n, -1),
        queue_lengths=np.full((n, n_servers), -1),
        work=np.full((n, n_servers), np.nan),
        choice_control=np.full(n, -1),
        choice_treatment=np.full(n, -1),
    )
    in_system = 0

    # (time, kind, sequence number, server, job, events at the server so far): the sequence number
    # keeps equal events in order.
    events: list[tuple[float, int, int, int, Job, int]] = []
    sequence = 0

    def schedule(time: float, kind: int, server: int, job: Job) -> None:
        nonlocal sequence
        count = servers[server].events if server >= 0 else 0
        heapq.heappush(events, (time, kind, sequence, server, job, count))
        sequence += 1

    def share_anew(index: int, now: float, joins: Job | None = None, leaves: Job | None = None):
        """Let a job join or leave; the rest of the work goes on with new shares."""
        server = servers[index]
        left = {id(job): remaining_work(job, now) for job in server.sharing}
        if joins is not None:
            joins.start = now
            left[id(joins)] = joins.service_time
            server.sharing.append(joins)
        if leaves is not None:
            server.sharing.remove(leaves)
        server.events += 1
        for job in server.sharing:
            job.progress.append((now, left[id(job)], 1 / len(server.sharing)))
        if server.sharing:
            least = min(server.sharing, key=lambda job: job.progress[-1][1])
            wait = least.progress[-1][1] * len(server.sharing)
            schedule(now + max(wait, 0.0), DEPARTURE, index, least)

    def start_next(index: int, now: float) -> None:
        server = servers[index]
        if server.serving is None and server.waiting:
            server.serving = server.waiting.popleft()
            server.serving.start = now
            schedule(now + server.serving.service_time, DEPARTURE, index, server.serving)

    for index, start, departure in present:
        job = Job(-1, -math.inf, departure - start)
        servers[index].history.append(job)
        in_system += 1
        if shares:
            share_anew(index, 0.0, joins=job)
        elif servers[index].serving is None:
            servers[index].serving = job
            job.start = start
            schedule(departure, DEPARTURE, index, job)
        else:
            servers[index].waiting.append(job)
    for task in range(n):
        schedule(float(draws.arrival[task]), ARRIVAL, -1, Job(task, math.nan, math.nan))

    while events:
        now, kind, _, index, job, count = heapq.heappop(events)
        if kind == DEPARTURE and count != servers[index].events:
            continue  # made void
        if kind == DEPARTURE:
            job.departure = now
            servers[index].serving = None
            in_system -= 1
            if job.task >= 0:
                path.departure[job.task] = now
                path.start[job.task] = job.start
            if shares:
                share_anew(index, now, leaves=job)
            else:
                start_next(index, now)
        elif kind == JOIN and shares:
            share_anew(index, now, joins=job)
        elif kind == JOIN:
            servers[index].waiting.append(job)
            start_next(index, now)
        else:
            task = job.task
            path.in_system[task] = in_system
            in_system += 1
            queue_lengths: list[int] = []
            work: list[float] = []
            for server in servers:
                # Who was seen to leave is never seen again; forgetting keeps the lists short.
                server.history = deque(old for old in server.history if old.departure > now - a)
                seen = seen_jobs(server, now, a)
                unseen = unseen_jobs(server, now, a) if scenario.counts_own_dispatches else []
                queue_lengths.append(len(seen) + len(unseen))
                work.append(
                    sum(remaining_work(old, now - a) for old in seen)
                    + sum(own.service_time for own in unseen)
                )
            path.queue_lengths[task] = queue_lengths
            path.work[task] = work
            treated = int(draws.treated[task])
            candidates = [int(server) for server in draws.candidates[task]]
            u = float(draws.u[task])
            choices = [-1, -1]
            for z, arm in enumerate(arms):
                if groups is None or z == treated:
                    choices[z] = choose(arm, queue_lengths, work, rates, candidates, u)
            path.choice_control[task], path.choice_treatment[task] = choices
            index = choices[treated]
            arms[treated].pointer = (arms[treated].pointer + 1) % len(arms[treated].servers)
            job.joined = now + b
            job.service_time = float(draws.requirement[task]) / servers[index].rate
            path.server[task] = index
            path.service_time[task] = job.service_time
            servers[index].history.append(job)
            schedule(job.joined, JOIN, index, job)
    return path


def draw_arrivals(
    arrivals: qdq.Poisson | qdq.Periodic | qdq.ArrivalTrace,
    n_servers: int,
    n: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """The first n arrival times after 0; a periodic rate by thinning a faster Poisson process."""
    if isinstance(arrivals, qdq.ArrivalTrace):
        return np.asarray(arrivals.times, dtype=float)[:n]
    if isinstance(arrivals, qdq.Poisson):
        return np.cumsum(rng.exponential(1 / (n_servers * arrivals.rate), n))
    fastest = arrivals.rate * (1 + arrivals.amplitude)
    times: list[float] = []
    now = 0.0
    while len(times) < n:
        now += rng.exponential(1 / (n_servers * fastest))
        rate = arrivals.rate * (
            1 + arrivals.amplitude * math.sin(2 * math.pi * now / arrivals.period)
        )
        if rng.random() * fastest < rate:
            times.append(now)
    return np.array(times)


def draw_requirements(
    law: qdq.Exponential | qdq.Deterministic | qdq.Pareto | qdq.LogNormal | qdq.ServiceTrace,
    n: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """n service requirements: independent and of mean 1, or the first n of a trace."""
    match law:
        case qdq.Exponential():
            return rng.exponential(1.0, n)
        case qdq.Deterministic():
            return np.ones(n)
        case qdq.Pareto(shape=shape):
            # numpy's pareto is that of type II from 0; one more makes it type I from 1.
            return (1 + rng.pareto(shape, n)) * (shape - 1) / shape
        case qdq.LogNormal(cv=cv):
            sigma = math.sqrt(math.log(1 + cv**2))
            return rng.lognormal(-(sigma**2) / 2, sigma, n)
        case qdq.ServiceTrace(requirements=requirements):
            return np.asarray(requirements, dtype=float)[:n]
    raise TypeError(f"unknown law {law!r}")


def draw_treated(
    design: object, arrival: np.ndarray, rng: np.random.Generator, treatment_capacity: float = 0.5
) -> np.ndarray:
    """Which tasks are treated; in a split, with the treatment group's share of the capacity."""
    n = len(arrival)
    match design:
        case qdq.Bernoulli(propensity=p):
            return rng.random(n) < p
        case qdq.Switchback(period=period, propensity=p):
            which = [math.floor(time / period) for time in arrival]
            arm = {j: bool(rng.random() < p) for j in sorted(set(which))}
            return np.array([arm[j] for j in which])
        case qdq.ServerSplit():
            return rng.random(n) < treatment_capacity
        case qdq.AllControl():
            return np.zeros(n, dtype=bool)
        case qdq.AllTreatment():
            return np.ones(n, dtype=bool)
    raise TypeError(f"unknown design {design!r}")


def draw_tasks(
    scenario: qdq.Scenario,
    design: object,
    n: int,
    rng: np.random.Generator,
    groups: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Draws:
    """Everything chance decides about n tasks, from numpy's generator; all candidates are drawn."""
    rates = np.broadcast_to(scenario.service_rates, scenario.n_servers)
    arrival = draw_arrivals(scenario.arrivals, scenario.n_servers, n, rng)
    share = sum(rates[i] for i in groups[1]) / sum(rates) if groups is not None else 0.5
    treated = draw_treated(design, arrival, rng, share)
    order: list[np.ndarray] = []
    for z in treated:
        servers = np.arange(scenario.n_servers) if groups is None else np.array(groups[int(z)])
        order.append(rng.permutation(servers))
    shortest = min(len(row) for row in order)
    return Draws(
        arrival=arrival,
        requirement=draw_requirements(scenario.service, n, rng),
        treated=treated,
        candidates=np.array([row[:shortest] for row in order]),
        u=rng.random(n),
    )
