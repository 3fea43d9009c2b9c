"""The truth to compare with: small systems by linear algebra, closed forms, and `true_effect`.

A few servers with exponential service form a Markov chain that can be solved outright. Let x be
the numbers of tasks at the servers just before an arrival, lam the total arrival rate and mu_s the
rate of server s. For arm z,

- f_z(x) is the expected response time of the arriving task: the mean of (x_s + 1) / mu_s over the
  server s that it may join;
- J_z is the routing kernel, from x to x with one more task at that server;
- R = lam (lam I - D)^(-1), with D the generator of departures alone, runs the servers until the
  next arrival.

Then P_z = J_z R leads from one arrival to the next, a share p of treated tasks gives P = p P_1 +
(1 - p) P_0 with stationary law pi and cost f = p f_1 + (1 - p) f_0, and

- the mean response is V(p) = pi f, and the global treatment effect is V(1) - V(0);
- the naive difference tends to the direct effect, pi (f_1 - f_0);
- wDQ of horizon L tends to pi (f_1 - f_0) + pi (P_1 - P_0) sum_{m=0}^{L-2} P^m f;
- qDQ of horizon L tends to pi (P_1 - P_0) sum_{m=0}^{L-1} P^m q / lam, with q(x) the tasks in
  system;
- both tend to the slope V'(p) as L grows, the second by Little's law.

The law pi is also that of the continuous-time chain with generator G = lam (J - I) + D, since
Poisson arrivals see time averages; G is sparse, and R is never formed: departures lower the total
number of tasks, so in order of the total D is triangular.

Under processor sharing the numbers of tasks move as they do under FCFS, since service is
exponential: V(p), the global effect, the slope and qDQ are the same. But how long a task stays then
depends on who comes after it, so that the direct effect and wDQ are not given by f_z, and are
refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from qdq import validation
from qdq.designs import AllControl, AllTreatment
from qdq.policies import (
    JoinIdleQueue,
    JoinShortestQueue,
    Policy,
    PowerOfD,
    RoundRobin,
    ShortestExpectedDelay,
    UserPolicy,
)
from qdq.scenario import (
    Exponential,
    Pareto,
    Periodic,
    Poisson,
    Scenario,
    Service,
    ServiceTrace,
)
from qdq.simulate import simulate

# scipy, joblib and tqdm are imported where they are used, so that importing qdq stays quick.
if TYPE_CHECKING:
    from scipy import sparse

# --------------------------------------------------------------------------------------------------
# Small chains
# --------------------------------------------------------------------------------------------------

# Most states that a chain may have: solving takes seconds then, and some hundred megabytes.
_MAX_STATES = 200_000
_MAX_SERVERS = 8
# Most states of the chain that the search for a truncation begins with.
_FIRST_STATES = 2_000

# ShortestExpectedDelay is a PowerOfD too.
_CHAIN_POLICIES = (PowerOfD, JoinShortestQueue, JoinIdleQueue)

_QUEUE_COSTS: dict[str, Callable[[NDArray[np.int64]], NDArray[np.float64]]] = {
    "in_system": lambda lengths: lengths.sum(axis=1).astype(np.float64),
    "including_self": lambda lengths: lengths.sum(axis=1) + 1.0,
    "waiting": lambda lengths: np.maximum(lengths - 1, 0).sum(axis=1).astype(np.float64),
    # E[integral of Q up to the next arrival] = (R q)(x) / lam from just after an arrival at which
    # x was found and routed, so each term of this reading has the expectation of the term of
    # `in_system`.
    "time_average": lambda lengths: lengths.sum(axis=1).astype(np.float64),
}


class _TooManyStates(ValueError):
    """A chain that would take too long to solve."""


@dataclass(frozen=True)
class _Equilibrium:
    """What the chain does at one treated share."""

    law: NDArray[np.float64]
    response: float
    boundary: NDArray[np.float64]  # for each class of servers, P(one of them is full)
    boundary_ratio: NDArray[np.float64]  # the same over P(the longest of them is one short)


@dataclass(frozen=True, eq=False, kw_only=True)
class SmallChain:
    """A few servers with exponential service, solved exactly. Made by `small_chain`.

    Queue lengths are cut off at `truncation`: a task that would make a queue longer is lost.

    Attributes
    ----------
    scenario : Scenario
        The system. Under processor sharing only what depends on the numbers of tasks alone is
        known: not `direct_effect`, `expected_dq_response`, and the reading ``queue="waiting"``,
        which raise ValueError.
    propensity : float
        Treated share p that the methods take when none is given.
    truncation : tuple of int, shape (n_servers,)
        Most tasks at each server, in the order of the scenario's servers.
    n_states : int
        Number of states, states that differ by an exchange of servers of equal rate counted once.
    truncation_error : float
        Size, in time units, of the error that the truncation makes in a mean response: the
        probability that a server is full, times (truncation + 1) / (rate * (1 - load)), summed
        over servers of different rates; the largest over the treated shares 0, `propensity` and 1.
        For random routing with equal rates this is n_servers / load times the error itself; the
        error of a slope can be larger, by a factor of about 1 / (1 - load).
    """

    scenario: Scenario
    propensity: float
    truncation: tuple[int, ...]
    _rates: NDArray[np.float64] = field(repr=False)  # ascending
    _classes: tuple[slice, ...] = field(repr=False)  # the servers of each rate
    _lengths: NDArray[np.int64] = field(repr=False)  # the states: by total, ascending in each class
    _control: tuple[sparse.csr_array, NDArray[np.float64]] = field(repr=False)  # J_0 and f_0
    _treatment: tuple[sparse.csr_array, NDArray[np.float64]] = field(repr=False)  # J_1 and f_1
    _departures: sparse.csr_array = field(repr=False)  # D
    _solved: dict[float, _Equilibrium] = field(default_factory=dict, repr=False)

    @property
    def n_states(self) -> int:
        """Number of states."""
        return int(self._lengths.shape[0])

    @property
    def truncation_error(self) -> float:
        """Size of the error that the truncation makes in a mean response, in time units."""
        return float(self._class_errors.sum())

    @property
    def global_effect(self) -> float:
        """Global treatment effect V(1) - V(0), in time units."""
        return self.mean_response(1.0) - self.mean_response(0.0)

    def mean_response(self, propensity: float | None = None) -> float:
        """Return V(p), the long-run mean response time when a share p of the tasks is treated.

        Parameters
        ----------
        propensity : float, optional
            Treated share p, in [0, 1]; by default the chain's.
        """
        return self._equilibrium(propensity).response

    def direct_effect(self, propensity: float | None = None) -> float:
        """Return the limit of the naive difference at treated share p.

        Parameters
        ----------
        propensity : float, optional
            Treated share p, in [0, 1]; by default the chain's.
        """
        self._refuse_sharing("the direct effect")
        return self._change_of_cost(self._checked_share(propensity))

    def slope(self, propensity: float | None = None) -> float:
        """Return V'(p), the limit of the DQ estimators as their horizon grows.

        Parameters
        ----------
        propensity : float, optional
            Treated share p, in [0, 1]; by default the chain's.
        """
        # V' = pi (f_1 - f_0) + pi' f, with pi' the derivative of the law: since pi G = 0,
        # pi' G = -lam pi (J_1 - J_0).
        p = self._checked_share(propensity)
        change = self._equilibrium(p).law @ (self._treatment[0] - self._control[0])
        derivative = self._solve_adjoint(p, self.scenario.total_arrival_rate * change)
        cost = p * self._treatment[1] + (1.0 - p) * self._control[1]
        # The solution is known up to a multiple of pi, to which the deviation from V is blind.
        deviation = cost - self._equilibrium(p).response
        return self._change_of_cost(p) + float(derivative @ deviation)

    @overload
    def expected_dq_response(self, horizon: int, propensity: float | None = None) -> float: ...

    @overload
    def expected_dq_response(
        self, horizon: Sequence[int] | NDArray[np.int64], propensity: float | None = None
    ) -> NDArray[np.float64]: ...

    def expected_dq_response(
        self, horizon: int | Sequence[int] | NDArray[np.int64], propensity: float | None = None
    ) -> float | NDArray[np.float64]:
        """Return the expectation of wDQ, the difference between the arms of W_i + ... + W_{i+L-1}.

        Parameters
        ----------
        horizon : int or sequence of int
            Horizon L in tasks, >= 1, or several of them.
        propensity : float, optional
            Treated share p, in [0, 1]; by default the chain's.

        Returns
        -------
        float, or ndarray of float with one entry a horizon
            Exact under inverse propensity, the limit in the number of tasks under group means.
        """
        self._refuse_sharing("the expectation of dq_response")
        horizons = _checked_horizons(horizon)
        p = self._checked_share(propensity)
        cost = p * self._treatment[1] + (1.0 - p) * self._control[1]
        # Task i itself, and the L - 1 tasks after it.
        sums = self._change_of_cost(p) + self._after_effects(p, cost, int(horizons.max()) - 1)
        return _shaped_like(horizon, sums[horizons - 1])

    @overload
    def expected_dq_queue(
        self, horizon: int, propensity: float | None = None, *, queue: str = "in_system"
    ) -> float: ...

    @overload
    def expected_dq_queue(
        self,
        horizon: Sequence[int] | NDArray[np.int64],
        propensity: float | None = None,
        *,
        queue: str = "in_system",
    ) -> NDArray[np.float64]: ...

    def expected_dq_queue(
        self,
        horizon: int | Sequence[int] | NDArray[np.int64],
        propensity: float | None = None,
        *,
        queue: str = "in_system",
    ) -> float | NDArray[np.float64]:
        """Return the expectation of qDQ, the difference between the arms of sums of q over L tasks.

        Parameters
        ----------
        horizon : int or sequence of int
            Horizon L in tasks, >= 1, or several of them.
        propensity : float, optional
            Treated share p, in [0, 1]; by default the chain's.
        queue : {'in_system', 'including_self', 'waiting', 'time_average'}, default 'in_system'
            Reading of the queue. All but 'waiting' have the same expectation.

        Returns
        -------
        float, or ndarray of float with one entry a horizon
            Exact under inverse propensity with the true arrival rate, the limit in the number of
            tasks under group means or with the estimated rate.
        """
        horizons = _checked_horizons(horizon)
        p = self._checked_share(propensity)
        if queue not in _QUEUE_COSTS:
            raise validation.refuse("queue", queue, "one of " + ", ".join(_QUEUE_COSTS))
        if queue == "waiting":
            self._refuse_sharing("queue='waiting'")
        cost = _QUEUE_COSTS[queue](self._lengths) / self.scenario.total_arrival_rate
        return _shaped_like(horizon, self._after_effects(p, cost, int(horizons.max()))[horizons])

    def _refuse_sharing(self, what: str) -> None:
        if self.scenario.discipline != "fcfs":
            raise ValueError(
                f"{what} is not known under discipline={self.scenario.discipline!r}: how long a "
                "task stays depends on who comes after it; only mean responses, the global effect, "
                "the slope and the other readings of dq_queue are the same as under FCFS"
            )

    def _change_of_cost(self, p: float) -> float:
        return float(self._equilibrium(p).law @ (self._treatment[1] - self._control[1]))

    def _checked_share(self, propensity: float | None) -> float:
        if propensity is None:
            return self.propensity
        return validation.number(
            "propensity", propensity, "a treated share in [0, 1]", at_least=0.0, at_most=1.0
        )

    def _after_effects(
        self, p: float, cost: NDArray[np.float64], n_terms: int
    ) -> NDArray[np.float64]:
        # Partial sums, from none to n_terms terms, of pi (P_1 - P_0) P^m cost.
        measure = self._equilibrium(p).law @ (self._treatment[0] - self._control[0])
        routing = (p * self._treatment[0] + (1.0 - p) * self._control[0]).T.tocsr()
        sums = np.zeros(n_terms + 1)
        for m in range(n_terms):
            measure = self._drain(measure)
            sums[m + 1] = sums[m] + measure @ cost
            measure = routing @ measure
        return sums

    @cached_property
    def _drain(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        # Application of R to a row vector. Departures lower the total, by which the states are
        # ordered, so the matrix is triangular and is factored as it stands.
        rate = self.scenario.total_arrival_rate
        from scipy import sparse

        drain = sparse.eye_array(self.n_states) - self._departures / rate
        return _factored(drain.T, "NATURAL").solve  # type: ignore[no-any-return]

    @cached_property
    def _class_errors(self) -> NDArray[np.float64]:
        full = np.max([self._equilibrium(p).boundary for p in (0.0, self.propensity, 1.0)], axis=0)
        longest = np.array([self._lengths[-1, servers.start] for servers in self._classes])
        rates = np.array([self._rates[servers.start] for servers in self._classes])
        return full * (longest + 1.0) / (rates * (1.0 - self.scenario.load))  # type: ignore[no-any-return]

    def _equilibrium(self, propensity: float | None) -> _Equilibrium:
        p = self._checked_share(propensity)
        if self.scenario.control == self.scenario.treatment:
            p = 0.0
        if p not in self._solved:
            self._solved[p] = self._solve(p)
        return self._solved[p]

    def _solve(self, p: float) -> _Equilibrium:
        # From a guess, the law of independent queues at this load, by a correction.
        law = self.scenario.load ** self._lengths.sum(axis=1)
        law /= law.sum()
        law += self._solve_adjoint(p, self._generator(p).T @ law)
        law /= law.sum()
        longest = [self._lengths[:, servers.stop - 1] for servers in self._classes]
        full = np.array([law[x == x[-1]].sum() for x in longest])
        nearly = np.array([law[x == x[-1] - 1].sum() for x in longest])
        return _Equilibrium(
            law=law,
            response=float(law @ (p * self._treatment[1] + (1.0 - p) * self._control[1])),
            boundary=full,
            boundary_ratio=np.divide(full, nearly, out=np.zeros_like(full), where=nearly > 0.0),
        )

    def _generator(self, p: float) -> sparse.csr_array:
        from scipy import sparse

        routing = p * self._treatment[0] + (1.0 - p) * self._control[0]
        arrivals = self.scenario.total_arrival_rate * (routing - sparse.eye_array(self.n_states))
        return (arrivals + self._departures).tocsr()

    def _solve_adjoint(self, p: float, b: NDArray[np.float64]) -> NDArray[np.float64]:
        # Solve -x G = b for a b of sum 0; x is left open by a multiple of the law.
        from scipy import sparse
        from scipy.sparse.linalg import LinearOperator, gmres

        matrix = -self._generator(p).T.tocsr()
        if self._rates.size <= 2:
            # The states lie in a plane, and an elimination (with x = 0 in the empty system, which
            # makes the rest regular) fills in little.
            x = _factored(matrix[1:, 1:], "MMD_AT_PLUS_A").solve(b[1:])
            return np.append(0.0, x)
        # Else GMRES, preconditioned by a symmetric Gauss-Seidel sweep over the states.
        diagonal = matrix.diagonal()
        lower = _factored(sparse.tril(matrix), "NATURAL")
        upper = _factored(sparse.triu(matrix), "NATURAL")
        sweep = LinearOperator(
            matrix.shape, lambda v: upper.solve(diagonal * lower.solve(v)), dtype=np.float64
        )
        x, failed = gmres(matrix, b, rtol=1e-12, restart=80, maxiter=40, M=sweep)
        if failed:
            raise RuntimeError(f"GMRES did not solve the chain of {self.scenario!r}")
        return x  # type: ignore[no-any-return]


def _factored(matrix: sparse.csr_array, order: str) -> Any:
    from scipy.sparse.linalg import splu

    # An M-matrix, so its diagonal needs no pivoting.
    options = {"SymmetricMode": True, "Equil": False}
    return splu(matrix.tocsc(), permc_spec=order, diag_pivot_thresh=0.0, options=options)


def small_chain(
    scenario: Scenario,
    propensity: float = 0.5,
    *,
    truncation: int | None = None,
    tolerance: float = 1e-9,
) -> SmallChain:
    """Solve a system of a few servers with exponential service exactly.

    Parameters
    ----------
    scenario : Scenario
        A system with Poisson arrivals, exponential service and no delays, whose policies are among
        PowerOfD, JoinShortestQueue, JoinIdleQueue and ShortestExpectedDelay. Rates may differ.
    propensity : float, default 0.5
        Treated share p, in [0, 1].
    truncation : int, optional
        Most tasks at a server, >= 1. By default it grows, for servers of different rates apart,
        until `truncation_error` is below `tolerance`.
    tolerance : float, default 1e-9
        Largest `truncation_error`, in time units, > 0. Used without `truncation` only.

    Returns
    -------
    SmallChain

    Raises
    ------
    ValueError
        If the scenario is not of this kind, is unstable, or has too many states.

    Examples
    --------
    >>> import qdq
    >>> from qdq.exact import small_chain
    >>> scenario = qdq.Scenario(n_servers=2, arrivals=qdq.Poisson(0.6),
    ...                         control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2))
    >>> chain = small_chain(scenario)
    >>> round(chain.global_effect, 5), round(chain.direct_effect(), 5)
    (-0.81822, -0.48797)
    """
    reason = _not_a_chain(scenario)
    if reason:
        raise ValueError(
            f"scenario has {reason}: a small chain needs at most {_MAX_SERVERS} servers, Poisson "
            "arrivals, exponential service, no delays, a load below 1 and policies among PowerOfD, "
            "JoinShortestQueue, JoinIdleQueue and ShortestExpectedDelay"
        )
    share = "a treated share in [0, 1]"
    propensity = validation.number("propensity", propensity, share, at_least=0.0, at_most=1.0)
    tolerance = validation.number("tolerance", tolerance, "a time > 0", above=0.0)
    n_classes = np.unique(scenario.rates).size
    if truncation is not None:
        longest = validation.integer("truncation", truncation, "an integer >= 1", at_least=1)
        return _build_chain(scenario, propensity, np.full(n_classes, longest))
    # Begin with a chain that costs next to nothing. The tail of a queue is close to geometric, and
    # its ratio (at most the load) tells how far to go from there.
    size = np.full(n_classes, 2)
    while _count_states(scenario, size + 1) <= _FIRST_STATES:
        size += 1
    target = tolerance / n_classes
    while True:
        chain = _build_chain(scenario, propensity, size)
        errors = chain._class_errors
        if errors.sum() <= tolerance:
            return chain
        short = errors > target
        ratio = np.max([now.boundary_ratio for now in chain._solved.values()], axis=0)
        steps = np.log(errors[short] / target) / -np.log(np.minimum(ratio, scenario.load)[short])
        size[short] += 1 + steps.astype(np.int64)


def _count_states(scenario: Scenario, size: NDArray[np.int64]) -> int:
    counts = np.unique(scenario.rates, return_counts=True)[1]
    each = (math.comb(int(b) + int(m), int(m)) for b, m in zip(size, counts, strict=True))
    return math.prod(each)


def _not_a_chain(scenario: Scenario) -> str | None:
    # What keeps the scenario from being solved by a small chain, if anything.
    if scenario.n_servers > _MAX_SERVERS:
        return f"n_servers={scenario.n_servers}"
    if not isinstance(scenario.arrivals, Poisson):
        return f"arrivals={scenario.arrivals!r}"
    if not isinstance(scenario.service, Exponential):
        return f"service={scenario.service!r}"
    for name in ("information_delay", "dispatch_delay"):
        if getattr(scenario, name) > 0.0:
            return f"{name}={getattr(scenario, name)!r}"
    for name in ("control", "treatment"):
        policy = getattr(scenario, name)
        if not isinstance(policy, _CHAIN_POLICIES):
            return f"{name}={policy!r}"
    if scenario.load >= 1.0:
        return f"load {scenario.load:.4g}"
    return None


def _build_chain(scenario: Scenario, propensity: float, size: NDArray[np.int64]) -> SmallChain:
    from scipy import sparse

    # The policies treat servers alike, so servers can be put in order of their rates, and states
    # that differ by an exchange of servers of equal rate are one state.
    rates, starts, class_of, counts = _by_rate(scenario.rates)
    n_states = _count_states(scenario, size)
    if n_states > _MAX_STATES:
        raise _TooManyStates(
            f"scenario has n_servers={scenario.n_servers} at load {scenario.load:.4g}: queues of "
            f"up to {int(size.max())} tasks make {n_states} states, more than {_MAX_STATES}; use "
            "fewer servers, a lower load, a smaller truncation or a larger tolerance"
        )
    classes = tuple(slice(int(s), int(s + m)) for s, m in zip(starts, counts, strict=True))
    parts = [
        itertools.combinations_with_replacement(range(int(b) + 1), int(m))
        for b, m in zip(size, counts, strict=True)
    ]
    lengths = np.array([sum(state, ()) for state in itertools.product(*parts)], dtype=np.int64)
    lengths = lengths[np.argsort(lengths.sum(axis=1), kind="stable")]
    radix = (int(size.max()) + 1) ** np.arange(rates.size, dtype=np.int64)
    keys = lengths @ radix
    by_key = np.argsort(keys)

    def index_of(states: NDArray[np.int64]) -> NDArray[np.int64]:
        for servers in classes:
            states[:, servers].sort(axis=1)
        return by_key[np.searchsorted(keys, states @ radix, sorter=by_key)]

    def kernel(weights: NDArray[np.float64], change: int) -> sparse.csr_array:
        # From each state, with weights[:, s], to the one with `change` more tasks at server s; a
        # task that would make a queue too long is lost.
        origins, targets, values = [], [], []
        for s in range(rates.size):
            from_ = np.flatnonzero(weights[:, s] > 0.0)
            states = lengths[from_]
            states[:, s] = np.minimum(states[:, s] + change, size[class_of[s]])
            origins.append(from_)
            targets.append(index_of(states))
            values.append(weights[from_, s])
        entries = (np.concatenate(origins), np.concatenate(targets))
        return sparse.csr_array((np.concatenate(values), entries), shape=(n_states, n_states))

    def arm(policy: Policy) -> tuple[sparse.csr_array, NDArray[np.float64]]:
        choice = _choice_probabilities(policy, lengths, rates)
        return kernel(choice, +1), (choice * ((lengths + 1) / rates)).sum(axis=1)

    busy = (lengths > 0) * rates
    longest = np.empty(rates.size, dtype=np.int64)
    longest[np.argsort(scenario.rates, kind="stable")] = size[class_of]
    return SmallChain(
        scenario=scenario,
        propensity=propensity,
        truncation=tuple(longest.tolist()),
        _rates=rates,
        _classes=classes,
        _lengths=lengths,
        _control=arm(scenario.control),
        _treatment=arm(scenario.treatment),
        _departures=(kernel(busy, -1) - sparse.diags_array(busy.sum(axis=1))).tocsr(),
    )


def _by_rate(rates: NDArray[np.float64]) -> tuple[NDArray[Any], ...]:
    # Rates in ascending order; first server, and number of servers, of each distinct rate; class
    # of each.
    ordered = np.sort(rates)
    _, starts, class_of, counts = np.unique(
        ordered, return_index=True, return_inverse=True, return_counts=True
    )
    return ordered, starts, class_of, counts


def _choice_probabilities(
    policy: Policy, lengths: NDArray[np.int64], rates: NDArray[np.float64]
) -> NDArray[np.float64]:
    # Probability of each server in each state, shape (n_states, n_servers); ties are broken
    # uniformly.
    n_servers = rates.size
    if isinstance(policy, JoinIdleQueue):
        idle = lengths == 0
        allowed = np.where(idle.any(axis=1, keepdims=True), idle, True)
        return allowed / allowed.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]
    score = (lengths + 1) / rates if isinstance(policy, ShortestExpectedDelay) else lengths
    d = policy.n_choices or n_servers
    choice = np.zeros(lengths.shape)
    for sampled in itertools.combinations(range(n_servers), d):
        seen = score[:, sampled]
        least = seen == seen.min(axis=1, keepdims=True)
        choice[:, sampled] += least / least.sum(axis=1, keepdims=True)
    return choice / math.comb(n_servers, d)


def _checked_horizons(horizon: int | Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    right = "a number of tasks >= 1, or a sequence of them"
    values = np.ravel(np.asarray(horizon, dtype=object)).tolist()
    if not values:
        raise validation.refuse("horizon", horizon, right)
    return np.array([validation.integer("horizon", value, right, at_least=1) for value in values])


def _shaped_like(horizon: Any, values: NDArray[np.float64]) -> float | NDArray[np.float64]:
    return float(values[0]) if np.ndim(horizon) == 0 else values


# --------------------------------------------------------------------------------------------------
# Closed forms
# --------------------------------------------------------------------------------------------------


def mm1_response(load: float) -> float:
    """Return the mean response time of an M/M/1 queue, in mean service times: 1 / (1 - load).

    Parameters
    ----------
    load : float
        Arrival rate over service rate, in [0, 1).
    """
    return 1.0 / (1.0 - _checked_load(load))


def pollaczek_khinchine(arrival_rate: float, service: Service, rate: float = 1.0) -> float:
    """Return the mean response time of an M/G/1 queue.

    Parameters
    ----------
    arrival_rate : float
        Arrival rate of the one server, tasks per unit time, > 0.
    service : Exponential, Deterministic, Pareto, LogNormal or ServiceTrace
        Law of the requirements, independent of each other.
    rate : float, default 1.0
        Speed of the server, > 0.

    Returns
    -------
    float
        E[S] + arrival_rate * E[S^2] / (2 * (1 - rho)), with S = requirement / rate and
        rho = arrival_rate * E[S].

    Raises
    ------
    ValueError
        If rho >= 1, or the requirements have an infinite variance: the mean response is infinite
        then.
    """
    mean, rho = _mean_and_load(arrival_rate, service, rate)
    if not math.isfinite(service.scv):
        raise ValueError(
            f"service={service!r} has an infinite variance, so the mean response of an M/G/1 "
            "queue is infinite: service must have a finite variance (for Pareto, shape > 2)"
        )
    return mean * (1.0 + rho * (1.0 + service.scv) / (2.0 * (1.0 - rho)))


def _mean_and_load(arrival_rate: float, service: Service, rate: float) -> tuple[float, float]:
    arrival_rate = validation.number("arrival_rate", arrival_rate, "a rate > 0", above=0.0)
    rate = validation.number("rate", rate, "a service rate > 0", above=0.0)
    mean = service.mean / rate
    rho = arrival_rate * mean
    if rho >= 1.0:
        raise ValueError(
            f"arrival_rate={arrival_rate!r} is a load of {rho:.4g}: it must be below 1"
        )
    return mean, rho


def processor_sharing_response(arrival_rate: float, service: Service, rate: float = 1.0) -> float:
    """Return the mean response time of an M/G/1 queue that shares its server.

    It depends on the mean of the requirements alone, which need no finite variance.

    Parameters
    ----------
    arrival_rate : float
        Arrival rate of the one server, tasks per unit time, > 0.
    service : Exponential, Deterministic, Pareto, LogNormal or ServiceTrace
        Law of the requirements, independent of each other.
    rate : float, default 1.0
        Speed of the server, > 0.

    Returns
    -------
    float
        E[S] / (1 - rho), with S = requirement / rate and rho = arrival_rate * E[S].

    Raises
    ------
    ValueError
        If rho >= 1.

    References
    ----------
    L. Kleinrock, Queueing Systems, Volume II: Computer Applications (1976), section 4.4.
    """
    mean, rho = _mean_and_load(arrival_rate, service, rate)
    return mean / (1.0 - rho)


def random_routing_response(scenario: Scenario) -> float:
    """Return the mean response time of a system under uniform random routing (d = 1).

    Each server is then an M/G/1 queue with the same arrival rate, whatever it is that the
    dispatcher sees; a dispatch delay adds itself. The policies of the scenario are not looked at,
    its discipline is.

    Parameters
    ----------
    scenario : Scenario
        A system with Poisson arrivals.

    Raises
    ------
    ValueError
        If arrivals are not Poisson, or as `pollaczek_khinchine` or `processor_sharing_response`.
    """
    if not isinstance(scenario.arrivals, Poisson):
        raise validation.refuse("arrivals", scenario.arrivals, "Poisson for a closed form")
    fcfs = scenario.discipline == "fcfs"
    response = pollaczek_khinchine if fcfs else processor_sharing_response
    per_server = [
        response(scenario.arrivals.rate, scenario.service, rate) for rate in scenario.rates
    ]
    return float(np.mean(per_server)) + scenario.dispatch_delay


def mean_field_response(load: float, d: int) -> float:
    """Return the mean response time of power-of-d in the limit of many servers.

    In mean service times; Poisson arrivals, exponential service, equal rates. In the limit, the
    share of servers with at least k tasks is load ** ((d^k - 1) / (d - 1)). N servers differ by
    O(1/N), see `refined_mean_field_response`.

    Parameters
    ----------
    load : float
        Arrival rate per server over service rate, in [0, 1).
    d : int
        Number of servers sampled, >= 1.

    References
    ----------
    M. Mitzenmacher, The power of two choices in randomized load balancing, IEEE Trans. Parallel
    Distrib. Syst. 12 (2001).
    """
    load, d = _checked_load(load), _checked_d(d)
    if d == 1 or load == 0.0:
        return mm1_response(load)
    return float(_fixed_point(load, d).sum()) / load


def refined_mean_field_response(n_servers: int, load: float, d: int) -> float:
    """Return the mean response time of power-of-d among N servers, up to O(1/N^2).

    In mean service times; Poisson arrivals, exponential service, equal rates.

    Parameters
    ----------
    n_servers : int
        Number of servers N, >= d.
    load : float
        Arrival rate per server over service rate, in [0, 1).
    d : int
        Number of distinct servers sampled, >= 1.

    Notes
    -----
    Let X_k be the share of servers with at least k tasks. Arrivals raise X_k by 1/N at rate
    N load (g(X_{k-1}) - g(X_k)), with g(x) = C(N x, d) / C(N, d) the probability that d distinct
    servers are all among N x; departures lower it at rate N (X_k - X_{k+1}). Since

        g(x) = x^d - (d (d - 1) / 2) x^(d-1) (1 - x) / N + O(1/N^2),

    the drift has a 1/N term of its own, C, which sampling with replacement would not have. Then
    E[X] = x* + v / N + O(1/N^2) at the fixed point x*, where A v + (B : W) / 2 + C = 0 with A the
    Jacobian of the limiting drift, B its second derivative, and W the covariance,
    A W + W A' + Q = 0, Q being the intensity of the jumps. By Little's law the response is
    sum_k E[X_k] / load.

    For d = 1 this is exact (v = 0). For d = 2 and 3 it is too small, by about 0.06 and 0.1 over
    N^2 (1 - load)^2 (from exact values at loads 0.5 to 0.8 and N = d to 6).

    References
    ----------
    N. Gast and B. Van Houdt, A refined mean field approximation, Proc. ACM Meas. Anal. Comput.
    Syst. 1(2) (2017).
    """
    load, d = _checked_load(load), _checked_d(d)
    n = validation.integer("n_servers", n_servers, f"an integer >= d={d}", at_least=d)
    if d == 1 or load == 0.0:
        return mm1_response(load)
    from scipy.linalg import solve_continuous_lyapunov

    x = _fixed_point(load, d)
    before, after = np.append(1.0, x[:-1]), np.append(x[1:], 0.0)
    size = x.size

    def gained(
        share: NDArray[np.float64], share_before: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return load * (share_before - share)

    # Derivatives of x^d; X_0 = 1 is no variable, so the first row has no entry to its left.
    first = d * x ** (d - 1)
    second = d * (d - 1) * x ** (d - 2.0)
    jacobian = np.diag(-load * first - 1.0) + np.diag(load * first[:-1], -1) + np.eye(size, k=1)
    intensity = np.diag(gained(x**d, before**d) + x - after)
    covariance = solve_continuous_lyapunov(jacobian, -intensity)
    spread = second * np.diag(covariance)
    curvature = gained(spread, np.append(0.0, spread[:-1]))
    distinct = -0.5 * d * (d - 1) * x ** (d - 1) * (1.0 - x)
    sampling = gained(distinct, np.append(0.0, distinct[:-1]))
    correction = np.linalg.solve(jacobian, -0.5 * curvature - sampling)
    return float(x.sum() + correction.sum() / n) / load


def _fixed_point(load: float, d: int) -> NDArray[np.float64]:
    # Shares of servers with at least 1, 2, ... tasks, down to where they no longer count.
    shares = [load]
    while shares[-1] > 1e-18:
        shares.append(load * shares[-1] ** d)
    return np.array(shares)


def _checked_load(load: float) -> float:
    return validation.number("load", load, "a load in [0, 1)", at_least=0.0, below=1.0)


def _checked_d(d: int) -> int:
    return validation.integer("d", d, "an integer >= 1", at_least=1)


# --------------------------------------------------------------------------------------------------
# The true effect of any scenario
# --------------------------------------------------------------------------------------------------

_FEWEST_REPLICATIONS = 32


@dataclass(frozen=True, kw_only=True)
class TrueEffect:
    """The global treatment effect of a scenario, as found by `true_effect`.

    Attributes
    ----------
    value : float
        Long-run mean response time when all tasks are treated, minus that when none is, in time
        units.
    standard_error : float
        Standard error of `value`; 0 if exact.
    method : {'exact', 'partly exact', 'simulation'}
        Whether both mean responses, one or none come from a closed form or a small chain.
    mean_response_control, mean_response_treatment : float
        The two mean response times.
    standard_error_control, standard_error_treatment : float
        Their standard errors, each by itself: the simulated arms share their random numbers, so
        that the error of the difference is smaller than these suggest.
    n_replications, n_tasks : int
        Number of independent replications, and of tasks counted in them, in all simulated arms
        together.
    scenario : Scenario
        The system.
    """

    value: float
    standard_error: float
    method: Literal["exact", "partly exact", "simulation"]
    mean_response_control: float
    mean_response_treatment: float
    standard_error_control: float
    standard_error_treatment: float
    n_replications: int
    n_tasks: int
    scenario: Scenario


def true_effect(
    scenario: Scenario,
    relative_error: float = 0.01,
    absolute_error: float | None = None,
    seed: int = 2,
    n_jobs: int = 1,
    progress: bool | None = None,
) -> TrueEffect:
    """Return the global treatment effect, exactly where that is possible, else by simulation.

    Exact are uniform random routing with Poisson arrivals (Pollaczek and Khinchine, or M/G/1 with
    processor sharing), and small systems that `small_chain` solves. All else is simulated, with
    common random numbers in both arms, in independent replications until standard_error <=
    max(relative_error * abs(value), absolute_error).

    Parameters
    ----------
    scenario : Scenario
        The system. With an `ArrivalTrace` or a `ServiceTrace`, the effect is that on one pass of
        the trace.
    relative_error : float, default 0.01
        Largest standard error relative to the effect, >= 0.
    absolute_error : float, optional
        Largest standard error that is always good enough, in time units, >= 0; by default 0.1 % of
        the control's mean response.
    seed : int, default 2
        Replication j has the seed ``(seed, 1, j)``.
    n_jobs : int, default 1
        Number of threads. The result does not depend on it.
    progress : bool, optional
        Whether to show a progress bar; by default on a terminal only.

    Returns
    -------
    TrueEffect

    Raises
    ------
    ValueError
        If the scenario is unstable, or a mean response is known to be infinite: an infinite
        variance of service under FCFS, and a policy that does not compare servers or servers that
        cannot carry the load without the fastest few.

    Notes
    -----
    Means are taken by regression over replications on two control variates: the mean requirement,
    less its known mean, and the number of arrivals, less its known mean. With an infinite variance
    of service that removes most of what the largest requirements do, but standard errors are
    still rough then.

    With `Pareto` service of shape a, k servers are held up at once, each for more than x, a share
    of time of the order x^(-k (a - 1)); if the others cannot carry the load, the mean response is
    infinite for k (a - 1) <= 1, and is refused.

    Examples
    --------
    >>> import qdq
    >>> truth = qdq.true_effect(qdq.Scenario(n_servers=2, arrivals=qdq.Poisson(0.6),
    ...                                      control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2)))
    >>> round(truth.value, 5), truth.standard_error, truth.method
    (-0.81822, 0.0, 'exact')
    """
    if not isinstance(scenario, Scenario):
        raise TypeError(f"scenario={scenario!r} is not a Scenario")
    right = "a number >= 0"
    relative = validation.number("relative_error", relative_error, right, at_least=0.0)
    absolute = None
    if absolute_error is not None:
        absolute = validation.number("absolute_error", absolute_error, right, at_least=0.0)
        if relative == absolute == 0.0:
            raise ValueError(
                "relative_error=0 and absolute_error=0 are never reached: at least one must be > 0"
            )
    seed = validation.integer("seed", seed, "an integer >= 0", at_least=0)
    n_jobs = validation.integer("n_jobs", n_jobs, "a number of threads >= 1", at_least=1)
    if scenario.load >= 1.0:
        raise ValueError(
            f"scenario has load {scenario.load:.4g}: it must be below 1, since an unstable system "
            "has no long-run mean response"
        )
    for name in ("control", "treatment"):
        if _mean_is_infinite(scenario, getattr(scenario, name)):
            load, policy = scenario.load, getattr(scenario, name)
            raise ValueError(
                f"service={scenario.service!r} has an infinite variance, so the mean response "
                f"under {name}={policy!r} at load {load:.4g} is infinite: service must have a "
                "finite variance (for Pareto, shape > 2), or the policies must compare two or "
                "more servers at a load that is carried with some of them held up"
            )
    exact = [
        _exact_response(scenario, scenario.control),
        _exact_response(scenario, scenario.treatment),
    ]
    if None in exact:
        tolerances = (relative, absolute)
        return _simulate_until(scenario, exact, tolerances, seed, n_jobs, progress)
    responses = np.array(exact, dtype=np.float64)
    return _as_effect(scenario, exact, responses, np.zeros(3), n_replications=0, n_tasks=0)


def _is_random_routing(scenario: Scenario, policy: Policy) -> bool:
    # With one server, all policies are the same.
    return policy.n_choices == 1 or scenario.n_servers == 1


def _mean_is_infinite(scenario: Scenario, policy: Policy) -> bool:
    # A requirement of infinite variance occupies its server for a time X with E[X^2] infinite. If
    # tasks go on joining that server at a positive rate, or if the other servers cannot carry the
    # load, then about X tasks wait for about X each. A user's policy may keep all but a few tasks
    # from such a server. Servers that share go on with the other tasks.
    if math.isfinite(scenario.service.scv) or scenario.discipline != "fcfs":
        return False
    if _is_random_routing(scenario, policy) or isinstance(policy, (RoundRobin, JoinIdleQueue)):
        return True
    # With tail index a, k servers at once are held up beyond x for a share of the time of order
    # x^(-k (a - 1)), which is too often for a finite mean if k (a - 1) <= 1 and the others cannot
    # carry the load.
    assert isinstance(scenario.service, Pareto)
    rates = np.sort(scenario.rates)[::-1]
    left = rates.sum() - np.cumsum(rates)
    held_up = np.arange(1, rates.size + 1)
    often = held_up * (scenario.service.shape - 1.0) <= 1.0
    demand = scenario.total_arrival_rate * scenario.service.mean
    return bool(np.any(often & (demand > left))) and not isinstance(policy, UserPolicy)


def _exact_response(scenario: Scenario, policy: Policy) -> float | None:
    # The mean response under one policy, if it can be had without simulation.
    if (
        _is_random_routing(scenario, policy)
        and isinstance(scenario.arrivals, Poisson)
        and not isinstance(scenario.service, ServiceTrace)
    ):
        return random_routing_response(scenario)
    if not isinstance(policy, _CHAIN_POLICIES):
        return None
    alone = scenario.replace(control=policy, treatment=policy)
    if _not_a_chain(alone):
        return None
    try:
        return small_chain(alone).mean_response()
    except _TooManyStates:
        return None


def _simulate_until(
    scenario: Scenario,
    exact: list[float | None],
    tolerances: tuple[float, float | None],
    seed: int,
    n_jobs: int,
    progress: bool | None,
) -> TrueEffect:
    from joblib import Parallel, delayed
    from tqdm import tqdm

    relative, absolute = tolerances
    arms = [arm for arm in (0, 1) if exact[arm] is None]
    known = np.array([math.nan if response is None else response for response in exact])
    n_tasks, end, expected = _replication_size(scenario)

    def replicate(j: int) -> list[float]:
        # Responses of both arms, summed over the tasks that arrive before `end` and divided by the
        # expected number of them, which is unbiased; and two control variates of mean 0.
        row = [0.0, 0.0, 0.0, 0.0]
        for arm in arms:
            design = AllTreatment() if arm else AllControl()
            log = simulate(scenario, design, n_tasks, (seed, 1, j), record=("service_time",))
            assert log.server is not None
            assert log.service_time is not None
            counted = log.arrival < end
            row[arm] = float(log.response_time[counted].sum()) / expected
            requirement = log.service_time[counted] * scenario.rates[log.server[counted]]
            row[2] = float(requirement.mean()) / scenario.service.mean - 1.0
            row[3] = requirement.size / expected - 1.0
        return row

    rows: list[list[float]] = []
    planned = _FEWEST_REPLICATIONS
    hidden = None if progress is None else not progress
    with tqdm(desc="true effect", unit="replication", delay=2.0, disable=hidden) as bar:
        while True:
            bar.total = planned
            jobs = (delayed(replicate)(j) for j in range(len(rows), planned))
            for row in Parallel(n_jobs, backend="threading", return_as="generator")(jobs):
                rows.append(row)
                bar.update()
            table = np.array(rows)
            outcomes = np.column_stack((table[:, :2], table[:, 1] - table[:, 0]))
            means, errors = _controlled_means(outcomes, table[:, 2:])
            responses = np.where(np.isnan(known), means[:2], known)
            floor = 0.001 * responses[0] if absolute is None else absolute
            target = max(relative * abs(responses[1] - responses[0]), floor)
            if errors[2] <= target:
                break
            # A little more than the errors ask for, since they are estimates.
            needed = 1.1 * planned * (errors[2] / target) ** 2 if target > 0.0 else math.inf
            planned = math.ceil(min(max(needed, 1.1 * planned), 4.0 * planned))
    return _as_effect(
        scenario,
        exact,
        responses,
        errors,
        n_replications=planned,
        n_tasks=len(arms) * round(float((table[:, 3] + 1.0).sum()) * expected),
    )


def _replication_size(scenario: Scenario) -> tuple[int, float, float]:
    # Tasks that a replication simulates, the time up to which they are counted, and how many of
    # them are expected: so many that the warm-up takes at most a sixth of the work, in whole cycles
    # of a periodic rate. A trace is taken as a whole.
    traces = [
        len(trace)
        for trace in (
            getattr(scenario.arrivals, "times", None),
            getattr(scenario.service, "requirements", None),
        )
        if trace is not None
    ]
    if traces:
        return min(traces), math.inf, float(min(traces))
    rate = scenario.total_arrival_rate
    end = max(10_000.0 / rate, 5.0 * scenario.default_warm_up)
    if isinstance(scenario.arrivals, Periodic):
        end = math.ceil(end / scenario.arrivals.period) * scenario.arrivals.period
    # More than `end` needs, by eight standard deviations.
    return math.ceil(rate * end + 8.0 * math.sqrt(rate * end)), end, rate * end


def _controlled_means(
    outcomes: NDArray[np.float64], controls: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    # Mean of each outcome less what least squares explains by control variates of mean 0, and its
    # standard error. For each replication the coefficients come from the others: so the mean is
    # unbiased, and a replication of great leverage shows in the standard error.
    n = len(outcomes)
    design = np.column_stack((np.ones(n), controls))
    inverse = np.linalg.pinv(design)
    leverage = np.einsum("ij,ji->i", design, inverse)
    deleted = (outcomes - design @ (inverse @ outcomes)) / (1.0 - leverage)[:, None]
    explained = controls @ (inverse @ outcomes)[1:]
    explained -= np.einsum("ij,ji->i", controls, inverse[1:])[:, None] * deleted
    adjusted = outcomes - explained
    return adjusted.mean(axis=0), adjusted.std(axis=0, ddof=1) / math.sqrt(n)


def _as_effect(
    scenario: Scenario,
    exact: list[float | None],
    responses: NDArray[np.float64],
    errors: NDArray[np.float64],
    *,
    n_replications: int,
    n_tasks: int,
) -> TrueEffect:
    methods: tuple[Literal["exact", "partly exact", "simulation"], ...]
    methods = ("exact", "partly exact", "simulation")
    return TrueEffect(
        value=float(responses[1] - responses[0]),
        standard_error=float(errors[2]),
        method=methods[exact.count(None)],
        mean_response_control=float(responses[0]),
        mean_response_treatment=float(responses[1]),
        standard_error_control=float(errors[0]),
        standard_error_treatment=float(errors[1]),
        n_replications=n_replications,
        n_tasks=n_tasks,
        scenario=scenario,
    )
