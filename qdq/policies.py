"""Routing policies: the rule by which an arm of the experiment picks a server for a task.

A policy sees the servers as the dispatcher does (with the scenario's information delay). Each task
has one random order of the servers, its *candidates*, shared by both arms, and one uniform number
for ties; so the choices that the two policies would make for the same task are comparable.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from qdq import validation


@dataclass(frozen=True)
class Policy:
    """What all routing policies share. Use one of the subclasses."""

    kind: ClassVar[str]

    @property
    def n_choices(self) -> int | None:
        """Number of candidates that the policy looks at; None if it looks at every server."""
        return None

    @property
    def min_servers(self) -> int:
        """Fewest servers that the policy can work with."""
        return self.n_choices or 1

    @property
    def forgets_fast(self) -> bool:
        """Whether the policy compares queues.

        Those of many servers then relax like 1/(1 - load) at moderate loads. The total of N servers
        cannot relax faster than that of one queue served by all, 1/(N (1 - sqrt(load))^2), which is
        longer for a few servers or a load close to 1.
        """
        return True

    def load(self, rates: NDArray[np.float64], demand: float) -> float:
        """Return the largest ratio of demand to capacity in the stability condition: below 1.

        Parameters
        ----------
        rates : ndarray of float, shape (n_servers,)
            Tasks that each server completes per unit time while busy.
        demand : float
            Total arrival rate, tasks per unit time.
        """
        return demand / float(np.sum(rates))

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as a JSON-native dictionary."""
        return {"type": type(self).__name__} | {f.name: getattr(self, f.name) for f in fields(self)}


def _sampled_load(rates: NDArray[np.float64], demand: float, d: int) -> float:
    # A task whose d candidates all lie among the k slowest servers must be served there, so those k
    # servers get at least demand * C(k, d) / C(N, d) (Foss and Chernova's condition, which is also
    # sufficient).
    n = rates.size
    slowest = np.cumsum(np.sort(rates))
    k = np.arange(d, n + 1)
    confined = np.ones(k.size)
    for i in range(d):
        confined *= (k - i) / (n - i)
    return float(np.max(demand * confined / slowest[d - 1 :]))


@dataclass(frozen=True)
class PowerOfD(Policy):
    """Sample d distinct servers uniformly, join the one with the fewest tasks.

    Ties go to the first of the tied in the task's random order of candidates.

    Parameters
    ----------
    d : int
        Number of servers sampled, from 1 (uniform random routing) to the number of servers (join
        the shortest queue).
    """

    kind: ClassVar[str] = "POWER_OF_D"
    d: int

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "d", validation.integer("d", self.d, "an integer >= 1", at_least=1)
        )

    @property
    def n_choices(self) -> int:
        """Number of candidates that the policy looks at."""
        return self.d

    @property
    def forgets_fast(self) -> bool:
        """Whether the policy chooses among two or more servers."""
        return self.d >= 2

    def load(self, rates: NDArray[np.float64], demand: float) -> float:
        """Return max over k = d..N of demand C(k, d) / C(N, d) over the k slowest servers' rate."""
        return _sampled_load(rates, demand, self.d)


@dataclass(frozen=True)
class ShortestExpectedDelay(PowerOfD):
    """Sample d distinct servers, join the one with the least (tasks in system + 1) / service rate.

    Ties go to the first of the tied in the task's random order of candidates.

    Parameters
    ----------
    d : int
        Number of servers sampled, from 1 to the number of servers.
    """

    kind: ClassVar[str] = "SHORTEST_EXPECTED_DELAY"


@dataclass(frozen=True)
class JoinShortestQueue(Policy):
    """Join the server with the fewest tasks of all; ties uniformly at random."""

    kind: ClassVar[str] = "JOIN_SHORTEST_QUEUE"


@dataclass(frozen=True)
class LeastWorkLeft(Policy):
    """Join the server with the least unfinished work, in time units; ties uniformly at random."""

    kind: ClassVar[str] = "LEAST_WORK_LEFT"


@dataclass(frozen=True)
class JoinIdleQueue(Policy):
    """Join a server chosen uniformly among the idle ones, or among all if none is idle."""

    kind: ClassVar[str] = "JOIN_IDLE_QUEUE"

    @property
    def forgets_fast(self) -> bool:
        """Return False: when no server is idle, the policy is uniform random routing."""
        return False

    def load(self, rates: NDArray[np.float64], demand: float) -> float:
        """Return demand over the total rate if rates are equal, else the load of random routing.

        The latter is sufficient, not necessary.
        """
        if np.ptp(rates) == 0:
            return super().load(rates, demand)
        return _sampled_load(rates, demand, 1)


@dataclass(frozen=True)
class RoundRobin(Policy):
    """Servers in turn, by a pointer of this arm's own, moved only by the tasks that it routes."""

    kind: ClassVar[str] = "ROUND_ROBIN"

    @property
    def forgets_fast(self) -> bool:
        """Return False: the policy does not look at the queues."""
        return False

    def load(self, rates: NDArray[np.float64], demand: float) -> float:
        """Return the demand on one server over the slowest rate."""
        return demand / rates.size / float(np.min(rates))


@dataclass(frozen=True)
class UserPolicy(Policy):
    """A policy of the user's own: a pure function compiled with ``numba.njit``.

    Parameters
    ----------
    function : callable
        ``choose(queue_lengths, work, rates, candidates, u) -> server``, compiled with
        ``numba.njit``: tasks at each server as the dispatcher sees them (int64, one per server),
        unfinished work in time units (float64, one per server), service rates (float64, one per
        server), all servers that this arm may use in the task's random order (int64), and a uniform
        number in [0, 1). It returns the index of a server that is among the candidates and must
        change none of its arguments.

    Notes
    -----
    Only the total rate is known to bound a user's policy, so its stability check is necessary, not
    sufficient; making one warns of that. Kernels with a user's policy are compiled anew in each
    process.
    """

    kind: ClassVar[str] = "USER_POLICY"
    function: Callable[..., int]

    def __post_init__(self) -> None:
        if not callable(getattr(self.function, "py_func", None)):
            raise TypeError(
                f"function={self.function!r} is not compiled: function must be decorated with "
                f"numba.njit and "
                "have the form choose(queue_lengths, work, rates, candidates, u) -> server"
            )
        names = self.function.py_func.__code__.co_argcount  # type: ignore[attr-defined]
        if names != 5:
            raise TypeError(
                f"function={self.function!r} takes {names} arguments: it must take the five "
                "(queue_lengths, work, rates, candidates, u)"
            )
        warnings.warn(
            "the stability of a UserPolicy is checked by the total service rate alone; "
            "a policy that neglects some servers can be unstable below it",
            UserWarning,
            stacklevel=3,
        )

    @property
    def forgets_fast(self) -> bool:
        """Return False: nothing is known of the policy."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Refuse: a user's function cannot be written down.

        Raises
        ------
        TypeError
            Always.
        """
        raise TypeError(
            f"{self!r} holds a function of the user's, which cannot be written to a file"
        )


_BY_NAME: dict[str, type[Policy]] = {
    cls.__name__: cls
    for cls in (
        PowerOfD,
        ShortestExpectedDelay,
        JoinShortestQueue,
        LeastWorkLeft,
        JoinIdleQueue,
        RoundRobin,
    )
}


def policy_from_dict(spec: dict[str, Any]) -> Policy:
    """Return the policy that `Policy.to_dict` wrote.

    Raises
    ------
    ValueError
        If the type is not the name of a built-in policy.
    """
    values = dict(spec)
    name = values.pop("type", None)
    if name not in _BY_NAME:
        raise validation.refuse("type", name, "one of " + ", ".join(sorted(_BY_NAME)))
    return _BY_NAME[name](**values)
