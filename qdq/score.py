"""Estimates that look at the server chosen and at the queues met, not at the arm alone.

Given what a task meets, its arm acts on what follows through the server that it joins, and through
nothing else. With ``pi_1, pi_0`` the probabilities by which treatment and control would have sent
the task there, the arm's score ``Z/p - (1 - Z)/(1 - p)`` may be replaced by its mean given that
choice,

    h = (pi_1 - pi_0) / (p pi_1 + (1 - p) pi_0),

without a change of any expectation. It is zero where both policies agree, and varies less.

- `dq_score` multiplies by it the truncated sums of `dq_response`, less their regression on what a
  task cannot influence: the queues it meets, the gaps between the later arrivals, and the service
  requirements.
- `lstd_dq` (Farias et al. 2022) multiplies by it the errors of a value function that is fitted to
  the log by least-squares temporal differences.

Both need the column ``server``: the queues are rebuilt from it, or taken as recorded.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qdq import estimators, inference, kernels, rebuild, trust, validation
from qdq.estimators import Estimate
from qdq.inference import Spread
from qdq.policies import (
    JoinIdleQueue,
    JoinShortestQueue,
    LeastWorkLeft,
    Policy,
    PowerOfD,
    RoundRobin,
    ShortestExpectedDelay,
)
from qdq.scenario import Periodic
from qdq.streaming import MOST_BLOCKS
from qdq.tasklog import TaskLog

# Share of the tasks that must be where rebuilt queues tell for ranks in them to be preferred to
# recorded choices, which make h vary more: they know one draw of candidates, ranks all.
_CONFIRMED = 0.99
# Beyond this share of tasks a log contradicts what is said of its policies.
MOST_IMPOSSIBLE = 1e-3

# Points of a window, as shares of it, at which gaps and requirements are summed up; the end first.
PARTS = (1.0, 0.5, 0.25, 0.75, 0.125)
# Stretches of the log, each of which has the regression of the others.
FOLDS = 10
# Windows side by side that each term of the regression needs.
WINDOWS_PER_TERM = 5
# Singular values below this share of the largest count as zero: terms that say the same.
_RANK = 1e-12
# Tasks whose terms are held at once.
_ROWS = 1 << 14

# Policies that prefer the least of a number, so that ranks give the probability of a choice.
_BY_RANK = (PowerOfD, JoinShortestQueue, JoinIdleQueue, LeastWorkLeft)

# Columns of the state that `kernels.queues_met` rebuilds.
_TOTAL, _BUSY, _TWO, _SQUARES, _JOINED, _WORK, _WORK_SQUARES, _CAPACITY, _REQUIREMENT = range(9)


def dq_score(
    log: TaskLog,
    control: Policy | None = None,
    treatment: Policy | None = None,
    *,
    horizon: int | None = None,
    n_servers: int | None = None,
    service: bool | None = None,
    level: float = 0.95,
    variance: str | None = None,
) -> Estimate:
    """Difference in truncated sums of response times, by scores of the servers chosen.

    Parameters
    ----------
    log : TaskLog
        Of a Bernoulli experiment, or from outside, with the column ``server``.
    control, treatment : Policy, optional
        The policies that routed the log; by default those of its scenario.
    horizon : int, optional
        L, the number of arrivals that a window spans, from 1 to below the number of counted tasks.
        By default ``floor(30 N lam)`` of the log's scenario; for a log from outside ``floor(30 *
        rate * mean service time)`` with the estimated arrival rate, if it has service times or its
        servers are FCFS.
    n_servers : int, optional
        Number of servers; by default the log's or its scenario's, else as many as occur in it, with
        a warning.
    service : bool, optional
        Whether service requirements, and with FCFS servers the work that they leave, enter the
        regression. By default they do if they are known and show no sign of depending on what they
        must not depend on (see Notes).
    level : float, default 0.95
        Confidence level.
    variance : str, optional
        How the standard error is found, as for `estimate`. ``"score"`` takes the terms of windows
        as independent; ``"jackknife"`` keeps the regression as it is.

    Returns
    -------
    Estimate
        Its expectation is that of `dq_response` with the same horizon.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, the log is of another design, has no servers or an empty arm, or
        the probability of a choice can't be had for a policy.

    Warns
    -----
    UserWarning
        If the number of servers is guessed; if tasks went where their policy would not have sent
        them; and as `estimate`.

    Notes
    -----
    The estimate is the mean of ``h_i (Y_i - x_i' b)`` over the windows ``i = 0 .. n - L - 1``, with
    ``Y_i = W_i + ... + W_{i+L-1}``. The terms x_i are known before task i is routed or drawn
    whatever it does, so ``E[h_i x_i] = 0`` whatever b is: tasks in system, servers with one task
    and with two or more, squared lengths, work left; arrival times and requirements within the
    window, summed up to five points of it; and products of these. Terms are dropped, the lesser
    ones first, until there are 5 windows side by side for each.

    b is found by least squares on nine tenths of the log, leaving out the tenth that it is used for
    and L windows on either side. Were each window's own outcome part of its fit, the estimate
    would shrink, the more the longer the windows and the more the terms: by 1 % at 3e5 tasks, L =
    480 and 48 terms.

    *Probability of a choice.* A policy that takes the least of a number among d random servers
    takes the given one with probability ``[C(k + t, d) - C(k, d)] / (t C(N, d))``, with k servers
    of a larger number and t of the same, itself included. The number is the queue length
    (`PowerOfD`; with d = N, `JoinShortestQueue`), whether there is a task (`JoinIdleQueue`),
    ``(length + 1) / rate`` (`ShortestExpectedDelay`) or the work left (`LeastWorkLeft`). Lengths
    are those recorded, else rebuilt with the delays of the log's scenario. A log without either of
    these that has recorded choices is taken to have those lengths if with its candidates they tell
    where more than 99 % of the tasks went. Otherwise, or for other policies, recorded choices are
    used: pi_z is then 1 if policy z chose the server and 0 if not. With `RoundRobin` the arm's own
    score is used, since its arm moves a pointer too.

    *Requirements* are service times times the rates of servers: the scenario's, or found from the
    mean service times where these differ between servers. Service times are the log's, or rebuilt
    as ``D - max(A, D of the task before)``. They count as exogenous if ``|t| < 4`` for their
    correlation with the queue length at joining, with the arm, and with the requirement before.

    References
    ----------
    V. Farias, A. Li, T. Peng, A. Zheng, Markovian interference in experiments, 2022.
    """
    level, variance = _checked_options(level, variance)
    met = _look(log, "dq_score", control, treatment, n_servers, service)
    result, _ = _scored(log, met, _horizon(log, met, horizon), level, variance)
    _warn_of_doubts(log, result)
    return result


def scored(
    log: TaskLog, control: Policy, treatment: Policy, horizon: int, service: bool, level: float
) -> tuple[Estimate, NDArray[np.float64]]:
    """Return what `dq_score` finds, and the values of windows (m,) that it is the mean of.

    It does not warn of what is doubtful about the log.
    """
    met = _look(log, "dq_score", control, treatment, None, service)
    return _scored(log, met, horizon, level, "hac")


def _scored(
    log: TaskLog, met: _Met, span: int, level: float, variance: str
) -> tuple[Estimate, NDArray[np.float64]]:
    products = _products(log, met, span)
    spread = spread_of_mean(products, log.treated[log.first_counted :][: products.size], variance)
    value = float(products.mean())
    result = _estimate("dq_score", value, spread, level, variance, span, products.size)
    return result, products


def _products(log: TaskLog, met: _Met, span: int) -> NDArray[np.float64]:
    first, stop = log.first_counted, log.n_tasks - span
    response = _window_sums(log.response_time, span)[first:stop]
    rest = _without_regression(response, _terms(log, met, span), span)
    products: NDArray[np.float64] = met.score[first:stop] * rest
    return products


def spread_of_mean(
    values: NDArray[np.float64], treated: NDArray[np.bool_], variance: str
) -> Spread:
    """Return the variance of the mean of values of windows, in the way that is asked for.

    Parameters
    ----------
    values : ndarray of float64, shape (m,)
    treated : ndarray of bool, shape (m,)
    variance : str
        As for `dq_score`.
    """
    value = float(values.mean())

    def influence(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
        counts, sums = blocks.sum(axis=1).T
        return (sums - value * counts) / values.size  # type: ignore[no-any-return]

    def estimate(sums: NDArray[np.float64]) -> float:
        return float(sums[:, 1].sum() / sums[:, 0].sum())

    blocks = _blocks(treated, values[:, None])
    by_score = Spread(float(values.var()) / values.size, math.inf)
    return inference.spread(variance, by_score, blocks, influence, estimate)


def lstd_dq(
    log: TaskLog,
    control: Policy | None = None,
    treatment: Policy | None = None,
    *,
    horizon: int = 1,
    n_servers: int | None = None,
    service: bool | None = None,
    level: float = 0.95,
    variance: str | None = None,
) -> Estimate:
    """Difference in Q, by a value function fitted to the log.

    Parameters
    ----------
    log, control, treatment, n_servers, level
        As for `dq_score`.
    horizon : int, default 1
        L: response times of so many arrivals are taken from the log, and what comes after from the
        value function. 1 is the estimator of the literature. A longer one is less biased where the
        value function is wrong, and varies more: it is right if either the value function is, or
        nothing comes after L arrivals.
    service : bool, optional
        Whether service requirements and the work that they leave are used, as for `dq_score`. They
        need FCFS servers here.
    variance : str, optional
        How the standard error is found, as for `estimate`. All but ``"jackknife"``, which fits the
        value function anew, use its linear influence.

    Returns
    -------
    Estimate
        Of the slope of the mean response at the log's treated share, to first order the effect.

    Raises
    ------
    TypeError, ValueError
        As for `dq_score`.

    Warns
    -----
    UserWarning
        As for `dq_score`; and if a delay or a rate that varies makes the queues met no Markov
        state, which biases the value function.

    Notes
    -----
    With rho the mean response, the value of a state is what the tasks from there on are expected to
    spend beyond rho each. It is taken to be ``phi' w`` with occupancy features: tasks in system Q
    and Q^2, servers with one task or more and the square, with two or more, squared lengths; and
    where requirements are used, work left V and V^2, its squares by server, and the products of V
    with Q and busy servers. w solves

        mean of phi_i (c_i - rho + phi_{i+1}' w - phi_i' w) = 0

    over the tasks in order, as the log's mixture of policies routed them (LSTD, average cost, on
    policy). The estimate is the mean of ``h_i (e_i + ... + e_{i+L-1})``, with the temporal
    differences ``e_i = c_i - rho + phi_{i+1}' w - phi_i' w`` and h as in `dq_score`.

    The gap after task i and its requirement are drawn whatever the state and the choice. So their
    part is taken off: the cost c_i is the response less the deviation of the service time from its
    mean at that server, and phi_{i+1} is taken less its regression on both and on their products
    with phi_i.

    References
    ----------
    V. Farias, A. Li, T. Peng, A. Zheng, Markovian interference in experiments, 2022.
    """
    level, variance = _checked_options(level, variance)
    right = "a number of arrivals >= 1"
    horizon = validation.integer("horizon", horizon, right, at_least=1)
    met = _look(log, "lstd_dq", control, treatment, n_servers, service)
    steps = log.n_tasks - log.first_counted - 1
    if horizon > steps:
        raise validation.refuse("horizon", horizon, f"below the number of counted tasks, {steps}")
    _warn_of_no_state(log)
    chain = _Chain.of(log, met, horizon)
    blocks = chain.blocks()
    moments = _moments(blocks).sum(axis=0)
    value, rho, weights = _solve(moments)

    # An error of the equation that w solves moves w, and w the estimate: by so much.
    lever = np.concatenate(([1.0], np.linalg.lstsq(-moments[2:, 2:].T, moments[1, 2:], _RANK)[0]))
    difference = np.concatenate(([-rho, 1.0], weights))

    def influence(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
        part = _moments(blocks)
        away = lever @ part[:, 1:] @ difference - value * part[:, 0, 0]
        return away / moments[0, 0]  # type: ignore[no-any-return]

    terms = (chain.left[:, 1:] @ lever) * (chain.right @ difference)
    by_score = Spread(float(terms.var()) / steps, math.inf)
    spread = inference.spread(
        variance, by_score, blocks, influence, lambda sums: _solve(_moments(sums[None])[0])[0]
    )
    windows = steps + 1 - horizon
    result = _estimate("lstd_dq", value, spread, level, variance, horizon, windows)
    _warn_of_doubts(log, result)
    return result


# --------------------------------------------------------------------------------------------------
# What a log shows of the choices and the queues
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Met:
    """The tasks of a log as they met the queues, those that are not counted included."""

    score: NDArray[np.float64]
    """(n,), h."""
    state: NDArray[np.float64]
    """(n, 9), as `kernels.queues_met` rebuilds it; without any delay of information."""
    rates: NDArray[np.float64]
    """(N,) of the servers, of mean one where they are found from the log."""
    server: NDArray[np.int32]
    service_time: NDArray[np.float64] | None
    """(n,), where they are known."""
    fcfs: bool
    uses_service: bool

    @property
    def unequal(self) -> bool:
        return bool(np.ptp(self.rates) > 0.0)

    @property
    def requirement(self) -> NDArray[np.float64]:
        """Service requirements, of mean zero."""
        assert self.service_time is not None
        requirement = self.service_time * self.rates[self.server]
        centred: NDArray[np.float64] = requirement - requirement.mean()
        return centred


def _look(
    log: TaskLog,
    method: str,
    control: Policy | None,
    treatment: Policy | None,
    n_servers: int | None,
    service: bool | None,
) -> _Met:
    """Check what both methods are given, rebuild the queues and score the choices."""
    rebuild.check(log, method)
    policies = _policies(log, control, treatment)
    if service is not None:
        service = validation.boolean("service", service)
    who = rebuild.servers(log, n_servers, stacklevel=4)
    n = who.number
    for name, policy in zip(("control", "treatment"), policies, strict=True):
        if policy.min_servers > n:
            raise ValueError(
                f"{name}={policy!r} samples more servers than there are: d must be at most {n}"
            )
    start = rebuild.start_of_service(log, who, _delays(log)[0])
    fcfs = rebuild.overtaken(log, start, who.tick) <= rebuild.MOST_OVERTAKEN
    service_time = log.service_time
    if service_time is None and fcfs:
        service_time = np.maximum(log.departure - start, 0.0)
    if log.scenario is not None:
        rates = log.scenario.rates
    elif service_time is None or not service_time.any():
        rates = np.ones(n)
    else:
        rates = rebuild.rates(who, service_time).rate * service_time.mean()

    counted = slice(log.first_counted, None)
    arms = log.treated[counted]
    p = float(arms.mean()) if log.propensity is None else log.propensity
    for name, tasks in (("control", ~arms), ("treated", arms)):
        if not tasks.any():
            raise ValueError(
                f"none of the {arms.size} counted tasks is {name}: {method} needs both arms"
            )
    kinds = [
        getattr(kernels, policy.kind) if _has_ranks(log, policy, rates) else -1
        for policy in policies
    ]
    ranks, state = _queues(log, who, rates, kinds)
    exact = log.queue_lengths is not None or log.scenario is not None
    exact = exact or _are_confirmed(log, who, policies, rates)
    score = _score(log, policies, n, p, ranks if min(kinds) >= 0 else None, exact)

    known = service_time is not None
    if service and not (known and (fcfs or method == "dq_score")):
        needs = "FCFS servers" if known else "the column service_time, or FCFS servers"
        raise ValueError(f"service=True needs {needs}: leave it at None")
    usable = known and (fcfs or method == "dq_score")
    if usable and service is None:
        assert service_time is not None
        usable = _is_exogenous(log, who, service_time)
    uses = usable if service is None else service
    return _Met(score, state, rates, who.joined, service_time, fcfs, uses)


def _checked_options(level: float, variance: str | None) -> tuple[float, str]:
    level = validation.number("level", level, "strictly between 0 and 1", above=0.0, below=1.0)
    if variance is None:
        return level, "hac"
    estimators.check_choice("variance", variance, estimators.VARIANCES)
    return level, variance


def _policies(
    log: TaskLog, control: Policy | None, treatment: Policy | None
) -> tuple[Policy, Policy]:
    found = []
    for name, given in (("control", control), ("treatment", treatment)):
        own = getattr(log.scenario, name, None)
        if given is None and own is None:
            raise ValueError(
                f"{name}=None is not allowed for a log without a scenario: {name} must be the "
                "policy that routed its tasks, such as PowerOfD(2)"
            )
        policy = own if given is None else given
        if type(policy) is Policy or not isinstance(policy, Policy):
            raise TypeError(
                f"{name}={policy!r} is not a policy: {name} must be one, such as PowerOfD(2)"
            )
        if own is not None and policy != own:
            raise validation.refuse(name, policy, f"what routed the log, {own!r}, or None")
        found.append(policy)
    return found[0], found[1]


def _has_ranks(log: TaskLog, policy: Policy, rates: NDArray[np.float64]) -> bool:
    """Whether what the policy compares can be rebuilt, so that ranks give its probabilities."""
    if not isinstance(policy, _BY_RANK):
        return False
    if isinstance(policy, LeastWorkLeft):
        return log.scenario is None or _delays(log) == (0.0, 0.0)
    if isinstance(policy, ShortestExpectedDelay):
        # Rates that are found from a log are never equal, so ties would be lost.
        return log.scenario is not None or bool(np.ptp(rates) == 0.0)
    return True


def _delays(log: TaskLog) -> tuple[float, float]:
    if log.scenario is None:
        return 0.0, 0.0
    return log.scenario.dispatch_delay, log.scenario.information_delay


def _queues(
    log: TaskLog,
    who: rebuild.Servers,
    rates: NDArray[np.float64],
    kinds: list[int],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the ranks of the servers chosen and the state met, as `kernels.queues_met` does."""
    first, n = who.before.size, log.n_tasks
    departure = np.concatenate((log.carried_over[:, 2], log.departure))
    seen = log.queue_lengths
    ranks = np.zeros((n, 2, 2), np.int64)
    state = np.zeros((n, 9))
    kernels.queues_met(
        np.concatenate((np.full(first, -np.inf), log.arrival)),
        departure,
        np.concatenate((who.before, who.joined)),
        np.argsort(departure, kind="stable"),
        first,
        *_delays(log),
        log.scenario is not None and log.scenario.counts_own_dispatches,
        np.zeros((0, rates.size), np.int32) if seen is None else seen.copy(),
        np.array(kinds, dtype=np.int64),
        rates,
        ranks,
        state,
    )
    return ranks, state


def _are_confirmed(
    log: TaskLog,
    who: rebuild.Servers,
    policies: tuple[Policy, Policy],
    rates: NDArray[np.float64],
) -> bool:
    """Whether the log's candidates and rebuilt queues tell where nearly all tasks went."""
    if who.candidates is None or not all(isinstance(policy, PowerOfD) for policy in policies):
        return False
    counted = slice(log.first_counted, log.n_tasks)
    sent = rebuild.sent_to(log, who, policies, rates, _delays(log), counted)
    return float(np.mean(sent == who.joined[counted])) > _CONFIRMED


def _score(
    log: TaskLog,
    policies: tuple[Policy, Policy],
    n: int,
    p: float,
    ranks: NDArray[np.int64] | None,
    exact: bool,
) -> NDArray[np.float64]:
    """Return h of every task; `ranks` is None where no ranks tell of a policy's choices.

    Choices that were recorded are preferred to ranks that are not `exact`.
    """
    if any(isinstance(policy, RoundRobin) for policy in policies):
        return np.where(log.treated, 1.0 / p, -1.0 / (1.0 - p))
    recorded = log.choice_control is not None and log.choice_treatment is not None
    if ranks is None or (recorded and not exact):
        if not recorded:
            raise ValueError(_what_is_missing(log, policies))
        # By the log's own numbers: they may differ from ours.
        control = np.where(log.server == log.choice_control, 1.0, 0.0)
        treatment = np.where(log.server == log.choice_treatment, 1.0, 0.0)
    else:
        control, treatment = (
            _choice_probability(ranks[:, arm], policy.n_choices or n, n)
            for arm, policy in enumerate(policies)
        )
    impossible = np.where(log.treated, treatment, control) <= 0.0
    share = float(impossible[log.first_counted :].mean())
    if share > MOST_IMPOSSIBLE:
        warnings.warn(
            f"{100.0 * share:.2g} % of the tasks joined servers to which {policies[0]!r} or "
            f"{policies[1]!r} would not have sent them: the dispatcher saw other queues than those "
            "of this log, as with delays or other traffic, or the policies are others",
            UserWarning,
            stacklevel=4,
        )
    mixed = p * treatment + (1.0 - p) * control
    return np.where(mixed > 0.0, (treatment - control) / np.where(mixed > 0.0, mixed, 1.0), 0.0)


def _what_is_missing(log: TaskLog, policies: tuple[Policy, Policy]) -> str:
    policy = next(
        policy for policy in policies if not _has_ranks(log, policy, np.array([1.0, 2.0]))
    )
    why = "is a function of the user's"
    if isinstance(policy, LeastWorkLeft):
        why = "sees work that the log does not show, with a delay"
    elif isinstance(policy, ShortestExpectedDelay):
        why = "compares service rates that differ and are not known"
    return (
        f"the probability of a choice can't be had for {policy!r}, which {why}: the log needs the "
        "columns choice_control and choice_treatment (of a simulation: record='choices')"
    )


def _choice_probability(ranks: NDArray[np.int64], d: int, n: int) -> NDArray[np.float64]:
    """Probability that the least of d servers drawn without replacement is the one chosen.

    Parameters
    ----------
    ranks : ndarray of int64, shape (m, 2)
        Servers with a larger number than the chosen one, and with the same, itself included.
    d, n : int
        Servers drawn, and servers in all.

    Returns
    -------
    ndarray of float64, shape (m,)
    """
    ratio = np.ones(n + 1)  # C(k, d) / C(n, d) for k = 0 .. n
    for i in range(d):
        ratio *= np.maximum(np.arange(n + 1) - i, 0) / (n - i)
    larger, same = ranks.T
    probability: NDArray[np.float64] = (ratio[larger + same] - ratio[larger]) / same
    return probability


def _is_exogenous(log: TaskLog, who: rebuild.Servers, time: NDArray[np.float64]) -> bool:
    """Whether requirements correlate with nothing that they must not depend on."""
    if not time.any():
        return True
    queue = rebuild.queue_at_joining(log, who, _delays(log)[0])
    counted = slice(log.first_counted, log.n_tasks)
    found = rebuild.exogeneity(log, who, time, queue, counted)
    return all(abs(t) <= rebuild.MOST_T for t in found.values())


def _horizon(log: TaskLog, met: _Met, horizon: int | None) -> int:
    counted = log.n_tasks - log.first_counted
    if horizon is not None:
        right = f"a number of arrivals >= 1 and below that of counted tasks, {counted}"
        if isinstance(horizon, str):
            raise validation.refuse("horizon", horizon, right)
        return validation.integer("horizon", horizon, right, at_least=1, at_most=counted - 1)
    if log.scenario is not None:
        span = log.scenario.default_horizon
    else:
        if met.service_time is None:
            raise ValueError(
                "horizon=None needs a scenario, service times or FCFS servers: give a horizon"
            )
        length = float(log.arrival[-1] - log.arrival[0])
        if not length > 0.0:
            raise ValueError("horizon=None needs arrivals at different times: give a horizon")
        rate = (log.n_tasks - 1) / length
        span = math.floor(30.0 * rate * float(met.service_time.mean()) + 1e-9)
    if not 1 <= span < counted:
        raise ValueError(
            f"horizon=None means {span} for this log, and it must be at least 1 and below the "
            f"number of counted tasks, {counted}: give a horizon"
        )
    return span


# --------------------------------------------------------------------------------------------------
# Regression on what a task cannot influence
# --------------------------------------------------------------------------------------------------


class _Terms(NamedTuple):
    """Terms of a regression: products of columns, the weightiest first."""

    columns: dict[str, NDArray[np.float64]]
    """Each of mean 0 and standard deviation 1 over the windows, or all zero."""
    products: list[tuple[str, ...]]

    def rows(self, begin: int, end: int) -> NDArray[np.float64]:
        """Return the terms of windows ``begin .. end - 1``, one column each."""
        terms = np.ones((end - begin, len(self.products)))
        for j, names in enumerate(self.products):
            for name in names:
                terms[:, j] *= self.columns[name][begin:end]
        return terms


def _window_sums(values: NDArray[np.float64], span: int) -> NDArray[np.float64]:
    """Sum each of the values and the ``span - 1`` after it, where there are as many."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    sums: NDArray[np.float64] = total[span:] - total[:-span]
    return sums


def _standardised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    spread = float(values.std())
    if not spread > 1e-12 * float(np.abs(values).max(initial=0.0)):
        return np.zeros(values.size)
    result: NDArray[np.float64] = (values - values.mean()) / spread
    return result


def _terms(log: TaskLog, met: _Met, span: int) -> _Terms:
    """Return the terms that a window's outcome is regressed on."""
    raw, states, lengths = _beyond_influence(log, met, span)
    load = "V" if "V" in raw else "Q"
    nets = [f"net{k}" for k in lengths]
    inputs = [name for k in lengths for name in (f"T{k}", f"R{k}") if name in raw]
    begin = 2 if "R squares" in raw else 1  # gap and requirement over the whole window
    names: list[tuple[str, ...]] = [(), (load,), *((name,) for name in inputs[:begin])]
    names += [("Q",), (nets[0], load), (nets[0], nets[0]), (load, load)]
    names += [(name,) for name in (*inputs, *states)]
    names += [("Q", "Q"), ("busy", "busy"), (load, "busy"), ("Q", load)]
    names += [(net, by) for net in nets for by in (load, "Q")]
    names += [(a, b) for i, a in enumerate(nets) for b in nets[i:]]
    names += [("R squares",)] if "R squares" in raw else []
    windows = raw["Q"].size
    products = list(dict.fromkeys(names))[: max(1, windows // (WINDOWS_PER_TERM * span))]
    used = dict.fromkeys(name for product in products for name in product)
    return _Terms({name: _standardised(raw[name]) for name in used}, products)


def _beyond_influence(
    log: TaskLog, met: _Met, span: int
) -> tuple[dict[str, NDArray[np.float64]], list[str], list[int]]:
    """Return what a task cannot influence, window by window.

    Returns
    -------
    raw : dict of str to ndarray of float64, shape (m,)
        The state that the task meets; and, up to several points of its window, time T, requirements
        R, and the work that would be left over if all servers were busy, net.
    states : list of str
        Those that are of the state.
    lengths : list of int
        Arrivals up to each point, the whole window first.
    """
    first, stop = log.first_counted, log.n_tasks - span
    state = met.state[first:stop]
    raw = {"Q": state[:, _TOTAL], "busy": state[:, _BUSY]}
    raw |= {"two": state[:, _TWO], "squares": state[:, _SQUARES]}
    if met.uses_service and met.fcfs:
        raw |= {"V": state[:, _REQUIREMENT], "V squares": state[:, _WORK_SQUARES]}
    if met.unequal:
        raw["capacity"] = state[:, _CAPACITY]
    states = list(raw)

    requirement = None
    if met.uses_service:
        assert met.service_time is not None
        # Constant ones tell no more than the number of arrivals.
        if met.service_time.std() > rebuild.CONSTANT * met.service_time.mean():
            requirement = met.requirement
    gap = np.diff(log.arrival)
    gap -= gap.mean()
    lengths = list(dict.fromkeys(max(1, round(part * span)) for part in PARTS))
    for k in lengths:
        time = _window_sums(gap, k)[first:stop]
        raw[f"T{k}"], raw[f"net{k}"] = time, -time
        if requirement is not None:
            work = _window_sums(requirement, k)[first:stop]
            raw[f"R{k}"] = work
            raw[f"net{k}"] = work - float(met.rates.sum()) * time
    if requirement is not None:
        raw["R squares"] = _window_sums(requirement**2, span)[first:stop]
    return raw, states, lengths


def _without_regression(
    values: NDArray[np.float64], terms: _Terms, span: int
) -> NDArray[np.float64]:
    """Return values less their regression, of each tenth on terms fitted away from it.

    Parameters
    ----------
    values : ndarray of float64, shape (m,)
    terms : _Terms
        Of the same windows.
    span : int
        L. Windows less than L from a tenth do not enter its fit.

    Returns
    -------
    ndarray of float64, shape (m,)
    """
    m, k = values.size, len(terms.products)
    centre = values.mean()
    values = values - centre
    folds = np.arange(FOLDS + 1) * m // FOLDS
    begins = np.maximum(folds[:-1] - span, 0)
    ends = np.minimum(folds[1:] + span, m)
    cuts = np.unique(np.concatenate((folds, begins, ends, np.arange(0, m, _ROWS))))
    squares = np.zeros((cuts.size, k, k))
    products = np.zeros((cuts.size, k))
    for i, (begin, end) in enumerate(itertools.pairwise(cuts), 1):
        x = terms.rows(begin, end)
        squares[i] = squares[i - 1] + x.T @ x
        products[i] = products[i - 1] + x.T @ values[begin:end]
    rest = values.copy()
    for fold in range(FOLDS):
        out, back = np.searchsorted(cuts, (begins[fold], ends[fold]))
        left = m - int(ends[fold] - begins[fold])
        if left < max(span, k):
            continue  # too short a log: less the mean alone
        b = _least_squares(
            squares[-1] - (squares[back] - squares[out]),
            products[-1] - (products[back] - products[out]),
        )
        stretch = np.arange(folds[fold], folds[fold + 1] + _ROWS, _ROWS)
        for begin, end in itertools.pairwise(np.minimum(stretch, folds[fold + 1])):
            rest[begin:end] -= terms.rows(begin, end) @ b
    return rest


def _least_squares(
    squares: NDArray[np.float64], products: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the least coefficients that solve normal equations."""
    inverse = np.linalg.pinv(squares, rcond=_RANK, hermitian=True)
    coefficients: NDArray[np.float64] = inverse @ products
    return coefficients


# --------------------------------------------------------------------------------------------------
# The value function
# --------------------------------------------------------------------------------------------------


class _Chain(NamedTuple):
    """Steps from one counted task to the next; all that `lstd_dq` asks of them are products."""

    left: NDArray[np.float64]
    """(n, 2 + k): 1; scores of the task and of the horizon - 1 before it, summed; phi."""
    right: NDArray[np.float64]
    """(n, 2 + k): 1; cost; by how much phi is more at the next task."""
    treated: NDArray[np.bool_]

    @classmethod
    def of(cls, log: TaskLog, met: _Met, horizon: int) -> _Chain:
        first = log.first_counted
        state = met.state[first:]
        q, busy, two, squares = state[:, :4].T
        columns: list[NDArray[np.float64]] = [q, q * q, busy, busy * busy, two, squares]
        if met.uses_service:
            v = state[:, _REQUIREMENT]
            columns += [v, v * v, state[:, _WORK_SQUARES], v * q, v * busy]
        if met.unequal:
            columns += [state[:, _CAPACITY]]
        phi = np.column_stack([_standardised(x) for x in columns])
        here, step = phi[:-1], np.diff(phi, axis=0)
        cost = log.response_time[first:-1]

        # What is drawn whatever the state and the choice.
        drawn = [_standardised(np.diff(log.arrival[first:]))]
        if met.uses_service:
            requirement = met.requirement[first:-1]
            cost = cost - requirement / met.rates[met.server[first:-1]]
            drawn.append(_standardised(requirement))
        one = np.ones(len(here))
        with_one = np.column_stack((one, here))
        chance = np.hstack([x[:, None] * with_one for x in drawn])
        step -= chance @ _least_squares(chance.T @ chance, chance.T @ step)

        # Only tasks with a whole horizon after them are scored.
        score = met.score[first : log.n_tasks - horizon]
        total = np.concatenate(([0.0], np.cumsum(score)))
        k = np.arange(len(here))
        trace = total[np.minimum(k + 1, score.size)] - total[np.maximum(k + 1 - horizon, 0)]
        trace *= len(here) / score.size  # so that a mean over steps is one over scored tasks
        left = np.column_stack((one, trace, here))
        return cls(left, np.column_stack((one, cost, step)), log.treated[first:-1])

    def blocks(self) -> NDArray[np.float64]:
        """Return counts by arm, as all blocks have, and in control's row the sums of products."""
        counts = _blocks(self.treated, np.zeros((len(self.left), 0)))
        blocks = np.zeros((len(counts), 2, 1 + self.left.shape[1] ** 2))
        blocks[:, :, :1] = counts
        ends = np.cumsum(counts.sum(axis=(1, 2))).astype(np.int64)
        for block, begin, end in zip(blocks, (0, *ends[:-1]), ends, strict=True):
            block[0, 1:] = (self.left[begin:end].T @ self.right[begin:end]).ravel()
        return blocks


def _moments(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of the products of left and right, (B, 2 + k, 2 + k)."""
    size = math.isqrt(blocks.shape[2] - 1)
    return blocks[:, 0, 1:].reshape(-1, size, size)


def _solve(moments: NDArray[np.float64]) -> tuple[float, float, NDArray[np.float64]]:
    """Return the estimate, rho and w."""
    mean = moments / moments[0, 0]
    rho = mean[0, 1]
    weights = np.linalg.lstsq(-mean[2:, 2:], mean[2:, 1] - rho * mean[2:, 0], _RANK)[0]
    return float(mean[1, 1] - rho * mean[1, 0] + mean[1, 2:] @ weights), float(rho), weights


def _warn_of_no_state(log: TaskLog) -> None:
    why = None
    if _delays(log) != (0.0, 0.0):
        why = "with a delay the queues met are not all that later ones depend on"
    elif log.scenario is not None:
        if isinstance(log.scenario.arrivals, Periodic):
            why = "with a periodic rate later queues depend on the time too"
    elif np.ptp(log.arrival) > 0.0:
        test = inference.constant_rate(log.arrival)
        if test is not None and test.p_value < trust.SUSPICIOUS_RATE:
            why = "arrivals are not Poisson at a constant rate"
    if why is not None:
        warnings.warn(
            f"{why}: the value function of lstd_dq is biased, use dq_score",
            UserWarning,
            stacklevel=3,
        )


# --------------------------------------------------------------------------------------------------
# What both share at the end
# --------------------------------------------------------------------------------------------------


def _blocks(treated: NDArray[np.bool_], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return counts, and sums of values (n, m), of each block and arm, shape (B, 2, 1 + m)."""
    n, m = values.shape
    length = 1
    while n > MOST_BLOCKS * length:
        length *= 2
    place = 2 * (np.arange(n) // length) + treated
    count = -(-n // length)
    sums = np.empty((2 * count, 1 + m))
    sums[:, 0] = np.bincount(place, minlength=2 * count)
    for j in range(m):
        sums[:, 1 + j] = np.bincount(place, values[:, j], minlength=2 * count)
    return sums.reshape(count, 2, 1 + m)


def _estimate(
    method: str,
    value: float,
    spread: Spread,
    level: float,
    variance: str,
    horizon: int,
    n_used: int,
) -> Estimate:
    return Estimate(
        method=method,
        value=value,
        standard_error=math.sqrt(max(spread.variance, 0.0)),
        level=level,
        degrees_of_freedom=spread.degrees_of_freedom,
        n_used=n_used,
        variance=variance,
        horizon=horizon,
    )


def _warn_of_doubts(log: TaskLog, result: Estimate) -> None:
    for doubt in trust.doubts(log, [result]):
        warnings.warn(doubt, UserWarning, stacklevel=3)
