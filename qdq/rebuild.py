"""What a log shows of its servers: how many, how they work, and what tasks ask of them.

Arrival, departure and server of each task say more than response times do. At a FCFS server a task
starts when the one ahead leaves, so departures tell service times; at a server that shares its
effort they are the integral of one over the tasks there. What is rebuilt so is what the server did.
Whether it is also what the task brought along shows in what it goes with: service that depends on
the queue, the arm or the task before is not the task's own.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qdq import kernels, trust, validation
from qdq.policies import Policy, RoundRobin, ShortestExpectedDelay
from qdq.tasklog import TaskLog

# Share of the tasks that leave before one that came earlier to the same server: none do so at a
# FCFS server, and a few in a thousand are as many as clocks of limited resolution explain.
MOST_OVERTAKEN = 1e-3
# The spread of the servers' mean service times over what chance alone gives. With 20 equal servers
# chance exceeds it once in a thousand times; a spread below it changes the effect by less than the
# noise of rates fitted one by one.
_UNEQUAL_RATES = 1.5
# Largest |t| of a correlation of requirements with what they must not depend on. There are three
# such tests, each with a false alarm of 6e-5.
MOST_T = 4.0
# A step of the clock that is not many times the rounding of times is that rounding; and what a step
# that is slightly wrong by rounding leaves of a gap counts as nothing.
_FEWEST_ROUNDINGS = 16.0
_ROUNDED = 0.01
# Standard deviation over mean of requirements that are all the same but for rounding.
CONSTANT = 1e-6
# Correlation of the requirements that sharing implies with the number of tasks that they met,
# beyond chance. It is zero if servers share; at load 0.7 it is -0.16 if they serve all their tasks
# at once, and -0.30 if always the last one to come.
_MOST_UNLIKE_SHARING = 0.05


class Servers(NamedTuple):
    """Which server each task went to, by numbers from 0."""

    number: int
    """N, of servers."""
    joined: NDArray[np.int32]
    """(n,) of the log's tasks."""
    before: NDArray[np.int32]
    """(m,) of those that were there when it began."""
    candidates: NDArray[np.int32] | None
    """(n, d) sampled for each task, where the log has them."""
    tick: float
    """Step of the log's clock, see `tick`."""


class Rates(NamedTuple):
    """How fast the servers are, shape (N,)."""

    rate: NDArray[np.float64]
    """One over the mean service time, the same for all unless they differ by more than chance."""
    mean: NDArray[np.float64]
    """Mean service time of each, and of all where no task went."""


def check(log: TaskLog, method: str) -> None:
    """Refuse what is not a log of a Bernoulli experiment with the column ``server``.

    Parameters
    ----------
    log : TaskLog
    method : str
        Name of the function that needs it.

    Raises
    ------
    TypeError, ValueError
    """
    if not isinstance(log, TaskLog):
        raise TypeError(f"log is a {type(log).__name__}: it must be a TaskLog")
    if not trust.by_task(log):
        origin = "one with the column period, a switchback"
        if log.design is not None:
            origin = f"of design {log.design!r}"
        raise ValueError(f"{method} needs a log of design Bernoulli, and this one is {origin}")
    if log.server is None:
        raise ValueError(
            f"the log has no column server: {method} needs the server that each task joined"
        )


def servers(log: TaskLog, n_servers: int | None, stacklevel: int) -> Servers:
    """Return who went where, and how many servers there are.

    Parameters
    ----------
    log : TaskLog
        With the column ``server``.
    n_servers : int, optional
        Number of servers; by default the log's, else its scenario's, else those that occur in it,
        with a warning. Where the log does not know it and names larger numbers, servers are
        numbered anew, in the order of their numbers.
    stacklevel : int
        Of the warning, as seen from here.

    Raises
    ------
    TypeError, ValueError
        If n_servers is not the log's own, or the log names more servers.

    Warns
    -----
    UserWarning
        If the number of servers is guessed.
    """
    assert log.server is not None
    before = log.carried_over[:, 0].astype(np.int32)
    known = log.n_servers
    if known is None and log.scenario is not None:
        known = log.scenario.n_servers
    if known is None and log.queue_lengths is not None:
        known = log.queue_lengths.shape[1]
    named = [before, log.server]
    if log.candidates is not None:
        named.append(log.candidates.ravel())
    used = np.unique(np.concatenate(named))
    anew = ", numbered anew in their order"
    if n_servers is not None:
        right = "a whole number >= 1" if known is None else f"the log's own, {known}, or None"
        n = validation.integer("n_servers", n_servers, right, at_least=known or 1, at_most=known)
        if used.size > n:
            raise validation.refuse("n_servers", n, f"at least {used.size}, as many as occur")
    elif known is not None:
        n = known
    else:
        n = used.size
        warnings.warn(
            f"the number of servers is not known and taken to be {n}, as many as occur"
            f"{anew if used[-1] >= n else ''}: give n_servers",
            UserWarning,
            stacklevel=stacklevel,
        )
    if used[-1] < n:
        return Servers(n, log.server.copy(), before, log.candidates, tick(log))
    if known is not None:
        raise ValueError(
            f"the log names server {used[-1]}: servers must be numbered from 0 to {n - 1}"
        )

    def renamed(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.searchsorted(used, numbers).astype(np.int32)

    candidates = None if log.candidates is None else renamed(log.candidates)
    return Servers(n, renamed(log.server), renamed(before), candidates, tick(log))


def tick(log: TaskLog) -> float:
    """Return the largest step of which all times are multiples, 0.0 if there is none.

    Times are taken from the first arrival. Their rounding in floating point counts for nothing, and
    a step so fine that it is lost in that is none; a simulation has no clock. The step is found as
    a greatest common divisor is, from the smallest difference between two times.
    """
    if log.scenario is not None:
        return 0.0
    times = np.unique(np.concatenate((log.arrival, log.departure)))
    noise = 4.0 * np.finfo(np.float64).eps * max(abs(times[0]), abs(times[-1]))
    times = times[1:] - log.arrival[0]
    if times.size == 0:
        return 0.0
    gaps = np.diff(times, prepend=0.0)
    step = float(np.min(gaps[gaps > noise], initial=np.inf))
    while _FEWEST_ROUNDINGS * noise < step < np.inf:
        rest = np.abs(gaps - step * np.rint(gaps / step))
        rest = rest[rest > _ROUNDED * step]
        if rest.size == 0:
            step = float(times[-1] / np.sum(np.rint(gaps / step)))
            exact = np.abs(times - step * np.rint(times / step)) <= noise
            return step if exact.all() else 0.0
        step = float(np.min(rest))
    return 0.0


def start_of_service(log: TaskLog, who: Servers, dispatch_delay: float) -> NDArray[np.float64]:
    """Return when FCFS servers would have begun each task, shape (n,)."""
    free = np.full(who.number, -np.inf)
    np.maximum.at(free, who.before, log.carried_over[:, 2])
    start: NDArray[np.float64] = kernels.start_of_service(
        log.arrival.copy(), log.departure.copy(), who.joined, dispatch_delay, free
    )
    return start


def overtaken(log: TaskLog, start: NDArray[np.float64], step: float) -> float:
    """Return the share of tasks that leave before a FCFS server would have begun them.

    By more than two ticks of the log's clock, as many as arrival and length in whole ticks explain.
    """
    # A task served in no time may seem to do so by rounding.
    rounding = 4.0 * np.finfo(np.float64).eps * np.abs(log.departure)
    early = start - log.departure > 2.5 * step + rounding
    return float(np.mean(early))


def shared_service(log: TaskLog, who: Servers) -> NDArray[np.float64]:
    """Return the service times of tasks at servers that share their effort, shape (n,)."""
    there = log.carried_over[:, 2] > log.arrival[0]
    departure = np.concatenate((log.carried_over[there, 2], log.departure))
    service: NDArray[np.float64] = kernels.service_under_sharing(
        np.concatenate((np.full(np.count_nonzero(there), log.arrival[0]), log.arrival)),
        departure,
        np.concatenate((who.before[there], who.joined)),
        np.argsort(departure, kind="stable"),
        who.number,
    )
    return service[np.count_nonzero(there) :]


def unlike_sharing(relative: NDArray[np.float64], queue: NDArray[np.int64]) -> float | None:
    """Return the correlation that shows that servers do not share, None if it shows nothing.

    Parameters
    ----------
    relative : ndarray of float64, shape (m,)
        Requirements that sharing implies, relative to the mean of the server.
    queue : ndarray of int64, shape (m,)
        Tasks met at the server.
    """
    found = correlation(relative, queue.astype(np.float64))
    chance = MOST_T / math.sqrt(relative.size)
    return found if abs(found) > _MOST_UNLIKE_SHARING + chance else None


def rates(who: Servers, time: NDArray[np.float64]) -> Rates:
    """Return the servers' rates, found from service times (n,) that are not all zero."""
    count = np.bincount(who.joined, minlength=who.number)
    total = np.bincount(who.joined, time, minlength=who.number)
    pooled = float(np.mean(time))
    means = np.where(total > 0.0, total / np.maximum(count, 1), pooled)
    # With equal counts, the sd of the means over that of the times times sqrt(N/n).
    spread = math.sqrt(float(np.mean(count * (means - pooled) ** 2)))
    # Where all take the same time, rounding is no difference.
    rounding = CONSTANT * pooled * math.sqrt(time.size / who.number)
    differ = spread > max(_UNEQUAL_RATES * float(np.std(time)), rounding)
    return Rates(1.0 / means if differ else np.full(who.number, 1.0 / pooled), means)


def queue_at_joining(log: TaskLog, who: Servers, dispatch_delay: float) -> NDArray[np.int64]:
    """Count the tasks that each task finds at its server when it gets there, shape (n,)."""
    found = np.empty(log.n_tasks, np.int64)
    order = np.argsort(who.joined, kind="stable")
    ends = np.cumsum(np.bincount(who.joined, minlength=who.number))
    for s, mine in enumerate(np.split(order, ends[:-1])):
        ahead = log.carried_over[who.before == s, 2]
        gone = np.searchsorted(
            np.sort(np.concatenate((ahead, log.departure[mine]))),
            log.arrival[mine] + dispatch_delay,
            side="right",
        )
        found[mine] = np.maximum(ahead.size + np.arange(mine.size) - gone, 0)
    return found


def sent_to(
    log: TaskLog,
    who: Servers,
    policies: tuple[Policy, Policy],
    rate: NDArray[np.float64],
    delays: tuple[float, float],
    part: slice,
) -> NDArray[np.int32]:
    """Return where policies send tasks, given the queues that the log itself shows.

    Parameters
    ----------
    log : TaskLog
        Of FCFS servers.
    who : Servers
        With candidates.
    policies : tuple of Policy
        Control and treatment, both determined by candidates.
    rate : ndarray of float64, shape (N,)
        Of the servers.
    delays : tuple of float
        Of dispatch and of information.
    part : slice
        The tasks that are asked for, the m of them.

    Returns
    -------
    ndarray of int32, shape (m,)
        A task's own server if its policy may have sent it there: with times in whole ticks, queues
        are known within bounds only.
    """
    assert who.candidates is not None
    expected = who.joined.copy()
    asked = np.zeros(log.n_tasks, bool)
    asked[part] = True
    for arm, policy in enumerate(policies):
        own = log.treated == bool(arm)
        if isinstance(policy, RoundRobin):
            mine = np.flatnonzero(own)
            expected[mine[1:]] = (who.joined[mine[:-1]] + 1) % who.number
            continue
        mine = np.flatnonzero(own & asked)
        at = who.candidates[mine, : policy.n_choices]
        least, most = _lengths_seen(log, who, mine, at, delays)
        if isinstance(policy, ShortestExpectedDelay):
            least, most = (least + 1.0) / rate[at], (most + 1.0) / rate[at]
        joined = who.joined[mine]
        preferred = np.take_along_axis(at, np.argmin(most, axis=1)[:, None], axis=1)[:, 0]
        if who.tick > 0.0:
            own_least = np.where(at == joined[:, None], least, np.inf).min(axis=1)
            may = own_least <= most.min(axis=1)
            preferred = np.where(may, joined, preferred)
        expected[mine] = preferred
    return expected[part]


def _lengths_seen(
    log: TaskLog,
    who: Servers,
    tasks: NDArray[np.int64],
    at: NDArray[np.int32],
    delays: tuple[float, float],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the fewest and the most tasks that the dispatcher may have seen, both (m, d).

    Parameters
    ----------
    tasks : ndarray of int64, shape (m,)
    at : ndarray of int32, shape (m, d)
        Servers that were looked at for each.
    """
    dispatch, information = delays
    least, most = np.empty(at.shape), np.empty(at.shape)
    for s in range(who.number):
        sent = np.flatnonzero(who.joined == s)
        joins = log.arrival[sent] + dispatch
        ahead = log.carried_over[who.before == s, 2]
        leaves = np.sort(np.concatenate((ahead, log.departure[sent])))
        here = np.nonzero(at == s)
        task = tasks[here[0]]
        moment = log.arrival[task] - information
        for bound, away in ((least, -who.tick), (most, who.tick)):
            # Of two arrivals the order is known if they are a tick apart, of an arrival and a
            # departure two: with lengths in whole ticks a departure is early by up to two. Half a
            # tick less than that, so that rounding decides nothing.
            came = np.searchsorted(joins, moment + 0.5 * away, side="right")
            if away <= 0.0:
                came = np.minimum(came, np.searchsorted(sent, task))
            left = np.searchsorted(leaves, moment - 1.5 * away, side="right")
            bound[here] = np.maximum(ahead.size + came - left, 0)
    return least, most


def response_at(
    log: TaskLog,
    who: Servers,
    server: NDArray[np.int32],
    time: NDArray[np.float64],
    rate: NDArray[np.float64],
    dispatch_delay: float,
) -> NDArray[np.float64]:
    """Return the response time of each task had it alone been sent elsewhere, shape (n,).

    Parameters
    ----------
    server : ndarray of int32, shape (n,)
        Where it is sent. At its own server its response is the log's.
    time : ndarray of float64, shape (n,)
        Service times at the log's servers.
    rate : ndarray of float64, shape (N,)
    dispatch_delay : float
    """
    response = log.response_time.copy()
    for s in range(who.number):
        free = np.max(log.carried_over[who.before == s, 2], initial=-np.inf)
        sent = np.flatnonzero(who.joined == s)
        until = np.maximum.accumulate(np.concatenate(([free], log.departure[sent])))
        tasks = np.flatnonzero((server == s) & (who.joined != s))
        ahead = until[np.searchsorted(sent, tasks)]
        arrival = log.arrival[tasks]
        begin = np.maximum(arrival + dispatch_delay, ahead) - arrival
        response[tasks] = begin + time[tasks] * rate[who.joined[tasks]] / rate[s]
    return response


def exogeneity(
    log: TaskLog,
    who: Servers,
    time: NDArray[np.float64],
    queue: NDArray[np.int64],
    part: slice,
) -> dict[str, float]:
    """Return t of the correlations of requirements with what they must not depend on.

    Parameters
    ----------
    log : TaskLog
    who : Servers
    time : ndarray of float64, shape (n,)
        Service times, compared with the mean of their server.
    queue : ndarray of int64, shape (n,)
        Tasks met at the server.
    part : slice
        The tasks that count.

    Returns
    -------
    dict of str to float
        By ``queue``, ``arm`` and ``previous``, the requirement of the task before; the correlation
        times the root of the number of tasks. Empty where requirements are all the same.

    Notes
    -----
    Tasks that arrive at the same time may be in any order, such as that of their departures. So
    they count as one that requires their mean when it comes to the task before.

    Lengths in whole ticks may all be short by half a tick, which shows in tasks that met an idle
    server only: of others it is the difference between two departures that counts. So t is the
    nearest to zero of those with half a tick more for them, or less.
    """
    mean = rates(who, time).mean[who.joined]
    relative = time / mean
    mine = relative[part]
    if float(np.std(mine)) <= max(CONSTANT * float(np.mean(mine)), who.tick / float(np.mean(mean))):
        return {}
    if who.tick == 0.0:
        return _correlations(log, relative, queue, part)
    half = 0.5 * who.tick / mean * (queue == 0)
    found = [_correlations(log, relative + away, queue, part) for away in (-half, half)]
    return {
        name: min(max(0.0, min(t, found[1][name])), max(t, found[1][name]))
        for name, t in found[0].items()
    }


def _correlations(
    log: TaskLog, relative: NDArray[np.float64], queue: NDArray[np.int64], part: slice
) -> dict[str, float]:
    mine = relative[part]
    begin = max(part.start - 1, 0)
    arrival = log.arrival[begin : part.stop]
    first = np.flatnonzero(np.diff(arrival, prepend=-np.inf) > 0.0)
    together = np.add.reduceat(relative[begin : part.stop], first)
    together /= np.diff(first, append=arrival.size)
    pairs = {
        "queue": (mine, queue[part].astype(np.float64)),
        "arm": (mine, log.treated[part].astype(np.float64)),
        "previous": (together[1:], together[:-1]),
    }
    return {name: correlation(x, y) * math.sqrt(x.size) for name, (x, y) in pairs.items()}


def correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the correlation, zero if one of the two is constant."""
    x, y = x - x.mean(), y - y.mean()
    square = float(x @ x) * float(y @ y)
    return float(x @ y) / math.sqrt(square) if square > 0.0 else 0.0
