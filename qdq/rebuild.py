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
        return Servers(n, log.server.copy(), before, log.candidates)
    if known is not None:
        raise ValueError(
            f"the log names server {used[-1]}: servers must be numbered from 0 to {n - 1}"
        )

    def renamed(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.searchsorted(used, numbers).astype(np.int32)

    candidates = None if log.candidates is None else renamed(log.candidates)
    return Servers(n, renamed(log.server), renamed(before), candidates)


def start_of_service(log: TaskLog, who: Servers, dispatch_delay: float) -> NDArray[np.float64]:
    """Return when FCFS servers would have begun each task, shape (n,)."""
    free = np.full(who.number, -np.inf)
    np.maximum.at(free, who.before, log.carried_over[:, 2])
    start: NDArray[np.float64] = kernels.start_of_service(
        log.arrival.copy(), log.departure.copy(), who.joined, dispatch_delay, free
    )
    return start


def overtaken(log: TaskLog, start: NDArray[np.float64]) -> float:
    """Return the share of tasks that leave before a FCFS server would have begun them."""
    # A task served in no time may seem to do so by rounding.
    early = start - log.departure > 4.0 * np.finfo(np.float64).eps * np.abs(log.departure)
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


def exogeneity(
    relative: NDArray[np.float64],
    queue: NDArray[np.int64],
    treated: NDArray[np.bool_],
    part: slice,
) -> dict[str, float]:
    """Return t of the correlations of requirements with what they must not depend on.

    Parameters
    ----------
    relative : ndarray of float64, shape (n,)
        Requirements, relative to the mean of their server.
    queue : ndarray of int64, shape (n,)
        Tasks met at the server.
    treated : ndarray of bool, shape (n,)
    part : slice
        The tasks that count.

    Returns
    -------
    dict of str to float
        By ``queue``, ``arm`` and ``previous``, the requirement of the task before; the correlation
        times the root of the number of tasks. Empty where requirements are all the same.
    """
    mine = relative[part]
    if float(np.std(mine)) <= CONSTANT * float(np.mean(mine)):
        return {}
    second = max(part.start, 1)
    pairs = {
        "queue": (mine, queue[part].astype(np.float64)),
        "arm": (mine, treated[part].astype(np.float64)),
        "previous": (relative[second : part.stop], relative[second - 1 : part.stop - 1]),
    }
    return {name: correlation(x, y) * math.sqrt(x.size) for name, (x, y) in pairs.items()}


def correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the correlation, zero if one of the two is constant."""
    x, y = x - x.mean(), y - y.mean()
    square = float(x @ x) * float(y @ y)
    return float(x @ y) / math.sqrt(square) if square > 0.0 else 0.0
