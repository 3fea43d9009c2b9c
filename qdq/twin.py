"""The log twin: the log's own tasks, sent through a fitted system with one arm for all.

From a Bernoulli log with the columns arrival, departure, treated and server one can rebuild what
every task asked of its server, fit what else the simulator must know (service rates, delays), and
see whether the system so found, run as the log was, behaves as the log says. If it does, running
it with everybody treated and with nobody treated gives the effect, with far less noise than any
difference of means: both runs share arrivals and requirements, and no slope at a share of one half
stands in for the effect of full deployment.

This is a model. It is nearly exact where its assumptions hold and silently wrong where they fail,
so the tests of fit are as much a part of it as the estimate, and where one of them fails the
estimate is another one: see `LogTwin`. What it assumes, and no test here can see: that arrivals do
not wait for answers, and that `control` and `treatment` are the policies that would be deployed.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qdq import rebuild, score, trust, validation
from qdq.estimators import Estimate, dq_response
from qdq.inference import Spread, confidence_interval
from qdq.policies import Policy, PowerOfD, RoundRobin
from qdq.scenario import ArrivalTrace, Scenario, ServiceTrace
from qdq.simulate import Seed, replay, run_traces, seed_sequence
from qdq.tasklog import TaskLog

FCFS = "fcfs"
PROCESSOR_SHARING = "processor_sharing"

# --------------------------------------------------------------------------------------------------
# Constants, and why they are what they are
# --------------------------------------------------------------------------------------------------

# What is left out at either end of the log, in tasks and as a share of it, whichever is less: the
# twin starts empty, and a log that was cut lacks its longest tasks.
_FIRST, _FIRST_SHARE = 20_000, 1 / 15
_LAST, _LAST_SHARE = 5_000, 1 / 60
_QUANTILES = (0.02, 0.1, 0.5, 0.95)
# Batches for the covariance of the 8 moments: three times as many as moments, so that it can be
# inverted, and each still long against the memory of the queues.
_BATCHES = 24
_TASKS_A_BATCH = 100
_TASKS_OF_AN_ARM_A_BATCH = 10
_SHRINKAGE = 0.1  # of the covariance to its diagonal: 24 batches tell little of 28 correlations
# Differences that count as none, relative, and the size from which they count so in mean service
# times: a fit is not refuted by the third digit however long the log.
_RELATIVE, _LEAST = 1e-3, 0.1
_LEAST_SD = 1e-3  # in mean service times, so that its logarithm exists

# Probabilities of a larger misfit by chance: to begin the search for delays, where a false alarm
# costs time only, and to distrust the twin.
_SEARCH_FROM = 0.05
_DISTRUST_FROM = 0.005
# A server that is busy for 98 % of the time or more has a mean response that no log of usual length
# tells from infinity.
MOST_LOAD = 0.98
# Difference between logged and modelled times over the sd of response: sd of that of service times,
# mean size of that of response times, which a few tasks sent elsewhere do not swamp.
_MOST_APART = 0.01
_LEAST_AGREEMENT = 0.99  # of choices: with the log's own candidates nothing is left to chance
_FEWEST_OF_A_LENGTH = 30  # tasks, for a mean and its error to be shown

# The search for delays: shares of the longest dispatch delay that the log allows, information
# delays in mean service times, the first and last steps from the best of these.
_DISPATCHES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
_INFORMATION = (0.0, 0.15, 0.3, 0.5, 0.75)
_STEPS = (0.16, 0.16)
_LAST_STEPS = (0.005, 0.01)  # far below what the misfit can tell
_LAST_STEPS_BY_CHOICES = (0.0002, 0.0005)  # a delay that is off by 1 % of a service is seen in them
_COARSE_TASKS = 30_000  # that tell one point of the grid from the next; a quarter if that is more
_NO_DELAY = 1e-6  # in mean service times: rounding
_DERIVATIVE_STEP = 0.1  # in mean service times: wide enough to rise above the noise of candidates

# Policies that candidates determine.
_TOLD = (PowerOfD, RoundRobin)
# Runs under either arm. Each averages over other pairs of arrivals and requirements and over other
# candidates; what is left of the error after a few is that of the log's own gaps and requirements.
_PASSES = 4
# Blocks that passes permute, and that the standard error comes from: long against the memory of the
# queues, and still enough for 19 degrees of freedom.
_BLOCKS = 20

_MOMENTS = (
    "mean response, treated",
    "mean response, control",
    "standard deviation, treated",
    "standard deviation, control",
    *(f"quantile {q:g} of the response" for q in _QUANTILES),
)


# --------------------------------------------------------------------------------------------------
# What is found
# --------------------------------------------------------------------------------------------------


class FitTest(NamedTuple):
    """One test of whether the twin behaves as the log."""

    name: str
    value: float
    threshold: float
    passed: bool
    meaning: str
    """What the outcome says, in words."""


class Moment(NamedTuple):
    """One figure of the response times, in the log and in its twin run as the log was."""

    name: str
    log: float
    log_error: float
    twin: float
    twin_error: float


class Loads(NamedTuple):
    """Work that arrives at each server per unit time if one arm routes all tasks, shape (N,)."""

    control: NDArray[np.float64]
    treatment: NDArray[np.float64]


class ByQueue(NamedTuple):
    """Requirements by the queue that tasks join: equal for all if service does not depend on it.

    For lengths that at least 30 tasks met.
    """

    queue_length: NDArray[np.int64]
    """Tasks at the server, the joining one not counted."""
    requirement: NDArray[np.float64]
    """Mean, relative to the mean of the server."""
    standard_error: NDArray[np.float64]


class Fallback(NamedTuple):
    """The twin's effect corrected by what Differences-in-Q finds in the log and not in the twin."""

    value: float
    """Twin's effect + DQ of the log - DQ of the twin."""
    standard_error: float
    degrees_of_freedom: float
    dq_log: float
    dq_twin: float
    horizon: int
    method: str
    """What DQ is: `dq_score`, or `dq_response` where that refuses a policy."""
    meaning: str = (
        "aims at the slope at the log's share of treatment, may miss half the effect at high load"
    )


class Scores(NamedTuple):
    """What `dq_score` finds in the log's counted tasks, to be seen beside the twin."""

    without_service: Estimate | None
    """None where it refuses a policy."""
    with_service: Estimate | None
    """None also where requirements depend on what they must not depend on."""


class MeanResponse(NamedTuple):
    """Mean response time in the twin if one policy routes all tasks, with its interval."""

    value: float
    standard_error: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class _Twin(Estimate):
    """An estimate from a twin, and why it is to be trusted or not."""

    trusted: bool
    """Whether all tests of fit hold."""
    twin_value: float
    """Effect in the twin, trusted or not."""
    twin_standard_error: float
    scenario: Scenario
    """The fitted system, with the log's arrivals and rebuilt requirements as traces."""
    tests: tuple[FitTest, ...]
    moments: tuple[Moment, ...]
    loads: Loads = dataclasses.field(compare=False)
    by_queue: ByQueue = dataclasses.field(compare=False)

    @property
    def verdict(self) -> str:
        """Whether the twin is trusted and, if not, which tests failed, in words."""
        failed = [test for test in self.tests if not test.passed]
        if not failed:
            return f"trusted: all {len(self.tests)} tests of fit hold"
        reasons = "; ".join(
            f"{test.name} ({test.value:.4g} against {test.threshold:.4g}): {test.meaning}"
            for test in failed
        )
        return f"not trusted: {len(failed)} of {len(self.tests)} tests of fit fail: {reasons}"

    @property
    def _more(self) -> str:
        """What is to be known beside the verdict, or nothing."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(filter(None, (Estimate.__repr__(self), self.verdict, self._more)))

    def _repr_html_(self) -> str:
        said = "; ".join(filter(None, (self.verdict, self._more)))
        rows = "".join(
            f"<tr><td>{escape(test.name)}</td><td>{test.value:.4g}</td>"
            f"<td>{test.threshold:.4g}</td><td>{'holds' if test.passed else 'fails'}</td>"
            f"<td>{escape(test.meaning)}</td></tr>"
            for test in self.tests
        )
        names = ("test of fit", "value", "threshold", "outcome", "what it says")
        head = "".join(f"<th>{name}</th>" for name in names)
        return (
            f"{Estimate._repr_html_(self)}<p>{escape(said[0].upper() + said[1:])}.</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        )


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class LogTwin(_Twin):
    """What `log_twin` found: an `Estimate`, and why it is to be trusted or not.

    Where all tests of fit hold, `value` and `standard_error` are the twin's. Where one fails they
    are those of the fallback, which corrects the twin by Differences-in-Q and shares their limits.
    Where an arm overloads a server there is no finite effect, and both are nan.
    """

    fallback: Fallback
    scores: Scores

    @property
    def _more(self) -> str:
        """What stands in for a twin that is not trusted, and what the twin says."""
        if self.trusted:
            return ""
        if math.isnan(self.standard_error):
            return (
                "deployed alone, an arm overloads a server, so that there is no finite effect to "
                "estimate"
            )
        found = [
            ("the twin alone", self.twin_value, self.twin_standard_error),
            *(
                (f"dq_score {name.replace('_', ' ')} terms", one.value, one.standard_error)
                for name, one in self.scores._asdict().items()
                if one is not None
            ),
        ]
        return (
            f"the value is the twin's corrected by {self.fallback.method}, which "
            f"{self.fallback.meaning}; "
            + ", ".join(
                f"{name} says {value:.6g}, standard error {error:.3g}"
                for name, value, error in found
            )
        )


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class WhatIf(_Twin):
    """What `what_if` found: an `Estimate`, and why it is to be trusted or not.

    Where a test of fit fails, `value` and `standard_error` are nan: no data tell of a policy that
    was never run but by the twin. `loads` and `mean_response` are those of the twin, trusted or
    not, and the treatment of `scenario` and of `loads` is the policy asked about.
    """

    policy: Policy
    mean_response: MeanResponse
    tested: bool
    """Whether the policy is one of the log's two."""

    @property
    def _more(self) -> str:
        """What the mean is, and what no test has seen."""
        mean = self.mean_response
        said = (
            f"under {self.policy!r} the twin's mean response is {mean.value:.6g}, "
            f"{100 * self.level:g} % interval [{mean.low:.6g}, {mean.high:.6g}]"
        )
        if not self.trusted:
            said += f"; less that under control it says {self.twin_value:.6g}"
        return said if self.tested else f"{said}; {_untested(self.policy)}"


def _untested(policy: Policy) -> str:
    return (
        f"no task of the log was routed by {policy!r}: only the policies of its two arms have been "
        "tested against data"
    )


# --------------------------------------------------------------------------------------------------
# The estimate
# --------------------------------------------------------------------------------------------------


def log_twin(
    log: TaskLog,
    control: Policy,
    treatment: Policy,
    n_servers: int | None = None,
    seed: Seed = 0,
    *,
    level: float = 0.95,
) -> LogTwin:
    """Estimate the effect of full deployment from a twin of the log: rebuilt, fitted and tested.

    Parameters
    ----------
    log : TaskLog
        Of a Bernoulli experiment, or from outside, with the column ``server``. Where it has
        ``candidates`` (of FCFS servers, and of policies that they determine: power of d, shortest
        expected delay, round robin) or ``service_time`` they are used: for the delays, and for
        sharper tests.
    control, treatment : Policy
        The policies that routed the log's control and treated tasks.
    n_servers : int, optional
        Number of servers. By default the log's or its scenario's, else as many as occur in it.
    seed : int or tuple of int, default 0
        Draws candidates and permutations; the same seed gives the same answer.
    level : float, default 0.95
        Confidence level.

    Returns
    -------
    LogTwin

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; if the log is of another design, has no servers, is too short or
        has (nearly) one arm only; or if its servers are neither FCFS nor share their effort.

    Warns
    -----
    UserWarning
        If the number of servers is guessed; and for what makes intervals
        doubtful, see `trust.doubts`.

    Notes
    -----
    **Rebuild.** With ``P_i`` the departure of the task ahead of task i at its server and b the
    dispatch delay, a FCFS server has spent ``S_i = D_i - max(A_i + b, P_i)`` on it. Where more than
    one task in a thousand leaves before the one ahead, servers are taken to share their effort, and
    ``S_i`` is the integral of one over the number of tasks there. They are refused if these service
    times go with the number of tasks met, which they do if a server works on its tasks in another
    way. A delay is not looked for where servers share: it shows as a misfit.

    **Fit.** Each server has a rate of its own if their mean service times differ by more than
    chance explains. Let M be the means and log standard deviations of the response in either arm
    and its quantiles 0.02, 0.1, 0.5 and 0.95, and V twice the covariance of M from 24 batches: the
    twin, run at the log's own arrivals, arms and requirements with candidates drawn anew, has the
    misfit ``J = (M_twin - M)' V**-1 (M_twin - M)``. V is too large for a difference of two runs
    that share so much, so J is below chi-square with 8 degrees of freedom. Where it is above the
    95 % point, dispatch and information delay are chosen to make it least. A log with candidates
    shows the delays directly: the twin's choices must be the log's. The dispatcher is taken not to
    count what it has sent and does not see yet; one that does has a shorter information delay.
    Without candidates a policy that is somewhat wrong may pass as a delay: a third sampled server
    taken for four is matched by one.

    **Tests.** See `LogTwin.tests`: the misfit; whether requirements depend on the queue joined, the
    arm or the requirement before; the load of each server under either arm alone. With candidates,
    each task's choice, and what another choice would have made of its response, one step ahead from
    the queues that the log itself shows.

    **Clocks.** Where all times are multiples of a tick, tasks count as overtaken from more than two
    ticks on, moments and service times may be off by their rounding, and a choice is wrong only if
    no times within the ticks explain it. All lengths may be short by half a tick: what this changes
    is a part of the standard error.

    **Estimate and its error.** The effect is the mean over four passes of the mean response with
    everybody treated minus that with nobody treated: first in the log's own order, then with 20
    blocks of gaps between arrivals permuted, 20 blocks of requirements permuted apart from them,
    and candidates drawn anew. Passes share the log's gaps and requirements, so more of them bring
    the error down to what these leave and no further. To first order a block's difference is the
    sum of an effect of its gaps, one of its requirements, and one of their pairing and candidates;
    with T the variance of the differences, and V_g and V_r those of their means over all passes by
    block of gaps and by block of requirements, the mean over K passes of B blocks has the variance
    ``(V_g + V_r - T/K)/B``, that of clusters crossed in two ways. For delays found by the misfit a
    term of the delta method is added. Degrees of freedom: 19.

    Permuted blocks keep what an arrival rate does within a block, a cycle's rise and fall included;
    its phase jumps at 19 places, where queues take a moment to follow. That is harmless while
    queues forget within much less than a block. Gaps and requirements are permuted apart, so
    requirements that rise with the arrival rate would lose that: they show in the test of
    requirements against queues.

    The requirements stand for their law. One whose largest values the log happens to lack is
    rebuilt without them: with heavy tails the value is too close to zero more often than not, and
    its standard error too small.

    **Where it is not trusted** the effect is corrected by ``DQ(log) - DQ(twin)``, both by
    `dq_score` with a horizon of 30 mean service times of arrivals, with service terms where
    requirements pass their tests. The twin's DQ is the mean over four runs in the log's own order
    with arms and candidates drawn anew: requirements that do depend on queues carry the log's own
    arms, and with these the twin would have some of the log's effect. The error of the correction
    is that of the windows' differences, which share gaps and requirements; it is taken as
    independent of the twin's. With a right twin the correction is zero on average, and what is
    estimated is the effect; with a wrong one it is, but for the truncation and the curvature that
    the twin knows of, the slope of the mean response at the log's share of treatment.

    References
    ----------
    C. Cameron, J. Gelbach, D. Miller, Robust inference with multiway clustering, 2011.

    Examples
    --------
    >>> import qdq
    >>> one, two = qdq.PowerOfD(1), qdq.PowerOfD(2)
    >>> scenario = qdq.Scenario(n_servers=2, control=one, treatment=two)
    >>> log = qdq.simulate(scenario, qdq.Bernoulli(0.5), n_tasks=50_000, seed=1)
    >>> twin = qdq.log_twin(log, one, two)
    >>> twin.trusted, twin.low < qdq.true_effect(scenario).value < twin.high
    (True, True)
    """
    level = validation.number("level", level, "strictly between 0 and 1", above=0.0, below=1.0)
    fit = _Fit(log, _who(log, n_servers, "log_twin"), control, treatment, seed, "log_twin")
    twin = _twin(fit, treatment)
    overloaded = max(map(np.max, twin.loads)) >= 1.0
    fallback, scores, doubts = _fallback(fit, twin, level)
    then = (math.nan, math.nan) if overloaded else fallback[:2]
    trusted = twin.trusted
    result = LogTwin(
        value=twin.effect.value if trusted else then[0],
        standard_error=twin.effect.standard_error if trusted else then[1],
        degrees_of_freedom=_BLOCKS - 1 if trusted else fallback.degrees_of_freedom,
        fallback=fallback,
        scores=scores,
        **_fields(fit, twin, level),
    )
    for doubt in ([] if trusted else doubts) + trust.doubts(log, [result]):
        warnings.warn(doubt, UserWarning, stacklevel=2)
    return result


def what_if(
    log: TaskLog,
    policy: Policy,
    control: Policy,
    treatment: Policy,
    n_servers: int | None = None,
    seed: Seed = 0,
    *,
    level: float = 0.95,
) -> WhatIf:
    """Estimate what a policy would do that was never run, from a twin of the log.

    Parameters
    ----------
    log : TaskLog
        As for `log_twin`.
    policy : Policy
        The policy asked about.
    control, treatment : Policy
        The policies that routed the log's control and treated tasks.
    n_servers, seed, level
        As for `log_twin`.

    Returns
    -------
    WhatIf
        Its value is the mean response under `policy` minus that under `control`. With
        ``policy=treatment`` it is that of `log_twin`, where that is trusted.

    Raises
    ------
    TypeError, ValueError
        As `log_twin`.

    Warns
    -----
    UserWarning
        If the policy is neither of the log's two, which alone have been tested against data; and as
        `log_twin`.

    Notes
    -----
    The twin is rebuilt, fitted and tested as in `log_twin`, with the log's own two policies, and
    run with `policy` in the place of treatment; the test of loads is of control and `policy`. No
    test can see what a new policy alone would bring to light: queues longer or more unequal than
    any in the log, and service that depends on them. There is no fallback.

    Examples
    --------
    >>> import warnings
    >>> import qdq
    >>> one, two, three = (qdq.PowerOfD(d) for d in (1, 2, 3))
    >>> scenario = qdq.Scenario(n_servers=4, control=one, treatment=two)
    >>> log = qdq.simulate(scenario, qdq.Bernoulli(0.5), n_tasks=50_000, seed=1)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # no task was routed by power-of-3
    ...     found = qdq.what_if(log, three, one, two)
    >>> truth = qdq.true_effect(scenario.replace(treatment=three)).value
    >>> found.trusted, found.low < truth < found.high
    (True, True)
    """
    level = validation.number("level", level, "strictly between 0 and 1", above=0.0, below=1.0)
    who = _who(log, n_servers, "what_if")
    if type(policy) is Policy or not isinstance(policy, Policy):
        raise TypeError(
            f"policy={policy!r} is not a policy: policy must be one, such as PowerOfD(2)"
        )
    if policy.min_servers > who.number:
        raise ValueError(
            f"policy={policy!r} samples more servers than there are: d must be at most {who.number}"
        )
    fit = _Fit(log, who, control, treatment, seed, "what_if")
    twin = _twin(fit, policy)
    ends = confidence_interval(*twin.mean, _BLOCKS - 1, level)
    result = WhatIf(
        value=twin.effect.value if twin.trusted else math.nan,
        standard_error=twin.effect.standard_error if twin.trusted else math.nan,
        degrees_of_freedom=_BLOCKS - 1,
        policy=policy,
        mean_response=MeanResponse(*twin.mean, *ends),
        tested=policy in (control, treatment),
        **_fields(fit, twin, level),
    )
    doubts = [] if result.tested else [_untested(policy)]
    for doubt in (*doubts, *trust.doubts(log, [result])):
        warnings.warn(doubt, UserWarning, stacklevel=2)
    return result


class _Figure(NamedTuple):
    value: float
    standard_error: float


class _Twinned(NamedTuple):
    """What the twin says of a policy, and how well it fits."""

    delays: _Delays
    run: _Run
    """As the log was."""
    effect: _Figure
    mean: _Figure
    loads: Loads
    scenario: Scenario
    by_queue: ByQueue
    tests: tuple[FitTest, ...]

    @property
    def trusted(self) -> bool:
        return all(test.passed for test in self.tests)


def _twin(fit: _Fit, policy: Policy) -> _Twinned:
    """Fit and test the twin, and run it with control and with a policy for all."""
    delays = _delays(fit)
    run = fit.run(delays)
    passes = _passes(fit, delays, policy)
    more = _variances_from_delays(fit, delays, policy) + _variances_from_tick(fit, delays, policy)
    effect, mean = (
        _Figure(float(blocks.mean()), math.sqrt(_crossed_variance(blocks, passes) + variance))
        for blocks, variance in zip((passes.difference, passes.response), more, strict=True)
    )
    names = ("control", "treatment" if policy == fit.treatment else repr(policy))
    by_queue, tests = _tests(fit, delays, run, passes.loads, names)
    scenario = fit.scenario(delays).replace(treatment=policy)
    return _Twinned(delays, run, effect, mean, passes.loads, scenario, by_queue, tests)


def _fields(fit: _Fit, twin: _Twinned, level: float) -> dict[str, Any]:
    """Return the fields of a result that do not depend on the question."""
    return {
        "method": fit.method,
        "level": level,
        "n_used": fit.stop - fit.first,
        "variance": "batch_means",
        "trusted": twin.trusted,
        "twin_value": twin.effect.value,
        "twin_standard_error": twin.effect.standard_error,
        "scenario": twin.scenario.replace(allow_unstable=twin.scenario.load >= 1.0),
        "tests": twin.tests,
        "moments": fit.compared(twin.run.response),
        "loads": twin.loads,
        "by_queue": twin.by_queue,
    }


# --------------------------------------------------------------------------------------------------
# Rebuilding the log
# --------------------------------------------------------------------------------------------------


def _who(log: TaskLog, n_servers: int | None, method: str) -> rebuild.Servers:
    """Check the log, and return who went where."""
    rebuild.check(log, method)
    treated = int(np.count_nonzero(log.treated))
    if treated in (0, log.n_tasks):
        raise ValueError(
            f"{treated} of the log's {log.n_tasks} tasks are treated: {method} needs both arms"
        )
    return rebuild.servers(log, n_servers, stacklevel=4)


class _Delays(NamedTuple):
    """Delays in the log's unit of time, and whether each was found by the misfit."""

    dispatch: float
    information: float
    fitted: tuple[bool, bool] = (False, False)


class _Run(NamedTuple):
    """What a run of the twin leaves: response time and server of each task."""

    response: NDArray[np.float64]
    server: NDArray[np.int32]


class _Service(NamedTuple):
    """Rebuilt service times, and the rates of the servers."""

    time: NDArray[np.float64]
    rates: rebuild.Rates


class _Fit:
    """The log, and the twin as a function of its two delays."""

    def __init__(
        self,
        log: TaskLog,
        who: rebuild.Servers,
        control: Policy,
        treatment: Policy,
        seed: Seed,
        method: str,
    ) -> None:
        self.log, self.who, self.method, self.seed = log, who, method, seed
        self.control, self.treatment = control, treatment
        # The first draws the candidates of all runs as the log was, so that they can be compared.
        # The last ones are for runs with other arms.
        self.streams = seed_sequence(seed).spawn(2 * _PASSES + 1)
        n = log.n_tasks
        self.first = max(log.first_counted, 1, min(_FIRST, int(n * _FIRST_SHARE)))
        self.stop = n - min(_LAST, int(n * _LAST_SHARE))
        self._check_length()
        self._services: dict[float, _Service] = {}
        self._scenarios: dict[float, Scenario] = {}
        self._log_moments: dict[int, NDArray[np.float64]] = {}
        self.discipline = FCFS
        overtaken = rebuild.overtaken(log, self._start(0.0), who.tick)
        if overtaken > rebuild.MOST_OVERTAKEN:
            self.discipline = PROCESSOR_SHARING
            self._check_sharing(overtaken)
        # Other policies break ties by numbers that no log holds, and no log shows the state from
        # which to go on at servers that share.
        told = all(isinstance(policy, _TOLD) for policy in (control, treatment))
        self.candidates = who.candidates if told and self.discipline == FCFS else None
        # Tasks that are sent under one arm: those after the counted ones slow them down or not.
        self.length = self.stop if self.discipline == FCFS else n
        self.unit = float(np.mean(self.service(0.0).time))
        self.scenario(_Delays(0.0, 0.0))  # refuses what are no policies

    def _check_length(self) -> None:
        counted = self.stop - self.first
        arms = [self.log.treated[part] for part in self.batches] if counted > 0 else []
        fewest = min((min(np.sum(arm), np.sum(~arm)) for arm in arms), default=0)
        if counted < _BATCHES * _TASKS_A_BATCH or fewest < _TASKS_OF_AN_ARM_A_BATCH:
            raise ValueError(
                f"the log's {self.log.n_tasks} tasks are too few: {self.method} needs "
                f"{_BATCHES * _TASKS_A_BATCH} between the ends that it leaves out, and in each of "
                f"{_BATCHES} stretches of them {_TASKS_OF_AN_ARM_A_BATCH} of either arm; it has "
                f"{max(counted, 0)}, and {fewest} in one stretch"
            )
        if self.log.arrival[-1] == self.log.arrival[0]:
            raise ValueError(f"all arrivals are at the same time: {self.method} needs a rate")

    @property
    def counted(self) -> slice:
        """The tasks that enter means and tests."""
        return slice(self.first, self.stop)

    @property
    def batches(self) -> list[slice]:
        """The stretches of the counted tasks that tell how moments vary."""
        edges = np.linspace(self.first, self.stop, _BATCHES + 1).astype(np.int64)
        return [slice(a, b) for a, b in pairwise(edges)]

    # ----------------------------------------------------------------------------------------------

    def _start(self, dispatch: float) -> NDArray[np.float64]:
        return rebuild.start_of_service(self.log, self.who, dispatch)

    def _check_sharing(self, overtaken: float) -> None:
        relative = self.relative(0.0)[self.counted]
        correlation = rebuild.unlike_sharing(relative, self.queue_at_joining(0.0)[self.counted])
        if correlation is not None:
            raise ValueError(
                f"the log's servers are neither FCFS ({100 * overtaken:.2g} % of the tasks leave "
                "before the one ahead of them) nor do they share their effort (the requirements "
                f"that this implies have a correlation of {correlation:+.2f} with the tasks met): "
                f"{self.method} has no model of them"
            )

    def service(self, dispatch: float) -> _Service:
        """Return the service times rebuilt with a dispatch delay, and what servers differ in."""
        if dispatch not in self._services:
            if self.discipline == FCFS:
                time = np.maximum(self.log.departure - self._start(dispatch), 0.0)
            else:
                time = rebuild.shared_service(self.log, self.who)
            if not time.any():
                raise ValueError(
                    f"all rebuilt service times are zero: {self.method} needs work to be done"
                )
            self._services[dispatch] = _Service(time, rebuild.rates(self.who, time))
        return self._services[dispatch]

    def relative(self, dispatch: float) -> NDArray[np.float64]:
        """Return service times over the mean of the server."""
        service = self.service(dispatch)
        return service.time / service.rates.mean[self.who.joined]

    def queue_at_joining(self, dispatch: float) -> NDArray[np.int64]:
        """Count the tasks that each task finds at its server when it gets there."""
        return rebuild.queue_at_joining(self.log, self.who, dispatch)

    # ----------------------------------------------------------------------------------------------

    def scenario(self, delays: _Delays) -> Scenario:
        """Return the system with some delays."""
        if delays.dispatch not in self._scenarios:
            service = self.service(delays.dispatch)
            rates = service.rates.rate
            equal = np.ptp(rates) == 0.0
            self._scenarios[delays.dispatch] = Scenario(
                n_servers=self.who.number,
                arrivals=ArrivalTrace(self.log.arrival),
                service=ServiceTrace(service.time * rates[self.who.joined]),
                service_rates=float(rates[0]) if equal else rates.tolist(),
                dispatch_delay=delays.dispatch,
                discipline=self.discipline,
                control=self.control,
                treatment=self.treatment,
                allow_unstable=True,
            )
        scenario = self._scenarios[delays.dispatch]
        return scenario.replace(information_delay=delays.information)

    def run(self, delays: _Delays, stop: int | None = None) -> _Run:
        """Run the twin as the log was, in its own order, up to some task."""
        scenario = self.scenario(delays)
        if self.candidates is not None:
            return self._run_on(scenario, stop)
        return _sent(scenario, self.log.treated[:stop], self.streams[0])

    def alone(self, delays: _Delays, policy: Policy) -> list[_Run]:
        """Run the twin in the log's own order with control, and with a policy, for all."""
        scenario = self.scenario(delays).replace(treatment=policy)
        candidates = self.candidates
        if candidates is not None:
            enough = (policy.n_choices or 0) <= candidates.shape[1]
            told = enough and isinstance(policy, _TOLD)
            candidates = candidates[: self.length] if told else None
        return [
            _sent(scenario, np.full(self.length, arm), self.streams[0], candidates)
            for arm in (False, True)
        ]

    def _run_on(self, scenario: Scenario, stop: int | None) -> _Run:
        """Run the twin as the log was, from the log's own state before the counted tasks.

        With the log's candidates nothing else is left to chance. From another state the twin would
        never again be in the log's: at high load one task more or less changes all later choices.
        """
        log, first = self.log, self.first
        assert self.candidates is not None
        time = self.service(scenario.dispatch_delay).time
        ahead, rest = slice(0, first), slice(first, stop)
        before = TaskLog(
            arrival=log.arrival[ahead],
            departure=log.departure[ahead],
            treated=log.treated[ahead],
            server=self.who.joined[ahead],
            service_time=time[ahead],
        )
        requirements = np.asarray(scenario.service.requirements)  # type: ignore[union-attr]
        response, server = run_traces(
            scenario.replace(
                arrivals=ArrivalTrace(log.arrival[rest]), service=ServiceTrace(requirements[rest])
            ),
            log.treated[rest],
            self.streams[0],
            self.candidates[rest],
            before,
        )
        return _Run(
            np.concatenate((log.response_time[ahead], response)),
            np.concatenate((self.who.joined[ahead], server)),
        )

    def figures(self, delays: _Delays, policy: Policy) -> NDArray[np.float64]:
        """Return the effect of a policy and the mean response under it, in the log's own order."""
        zero, one = (run.response[self.counted] for run in self.alone(delays, policy))
        return np.array([np.mean(one - zero), np.mean(one)])

    def sent_to(self, delays: _Delays, stop: int | None = None) -> NDArray[np.int32]:
        """Return where the log's queues and candidates send the counted tasks, up to some task.

        Each is sent from the log's own state. In a run one task that goes elsewhere, by a count
        that the log does not quite show, changes the choices of many after it.
        """
        rates = self.service(delays.dispatch).rates.rate
        part = slice(self.first, stop or self.stop)
        policies = self.control, self.treatment
        return rebuild.sent_to(self.log, self.who, policies, rates, delays[:2], part)

    def agreement(self, delays: _Delays, stop: int | None = None) -> float:
        """Return the share of the tasks that are sent where they went in the log."""
        server = self.sent_to(delays, stop)
        return float(np.mean(server == self.who.joined[self.first :][: server.size]))

    # ----------------------------------------------------------------------------------------------

    def moments_of(self, response: NDArray[np.float64], part: slice) -> NDArray[np.float64]:
        """Return the moments of some tasks' response, in mean service times."""
        values, treated = response[part] / self.unit, self.log.treated[part]
        arms = values[treated], values[~treated]
        spreads = [math.log(max(float(np.std(arm)), _LEAST_SD)) for arm in arms]
        means = [float(np.mean(arm)) for arm in arms]
        return np.array([*means, *spreads, *np.quantile(values, _QUANTILES)])

    def _covariance(self, response: NDArray[np.float64]) -> NDArray[np.float64]:
        batches = [self.moments_of(response, part) for part in self.batches]
        covariance: NDArray[np.float64] = np.cov(np.array(batches).T) / _BATCHES
        return covariance

    def log_moments_to(self, stop: int) -> NDArray[np.float64]:
        """Return the moments of the log up to some task."""
        if stop not in self._log_moments:
            part = slice(self.first, stop)
            self._log_moments[stop] = self.moments_of(self.log.response_time, part)
        return self._log_moments[stop]

    @property
    def log_moments(self) -> NDArray[np.float64]:
        """Moments of the log."""
        return self.log_moments_to(self.stop)

    @cached_property
    def log_covariance(self) -> NDArray[np.float64]:
        """Their covariance."""
        return self._covariance(self.log.response_time)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Inverse of V, as in `log_twin`."""
        v = 2.0 * self.log_covariance
        v = (1.0 - _SHRINKAGE) * v + _SHRINKAGE * np.diag(np.diag(v))
        allowed = _RELATIVE * np.maximum(np.abs(self.log_moments), _LEAST)
        # A response time is off by two roundings, its spread relative to itself.
        rounding = np.full(allowed.size, 2.0 * (self.who.tick / self.unit) ** 2 / 12.0)
        rounding[2:4] /= np.exp(2.0 * self.log_moments[2:4])
        return np.asarray(np.linalg.inv(v + np.diag(allowed**2 + rounding)), np.float64)

    def misfit(self, response: NDArray[np.float64]) -> float:
        """Return J of a run as the log was, maybe of its first tasks only."""
        stop = min(response.size, self.stop)
        apart = self.moments_of(response, slice(self.first, stop)) - self.log_moments_to(stop)
        return float(apart @ self.weights @ apart)

    def compared(self, response: NDArray[np.float64]) -> tuple[Moment, ...]:
        """Return the moments of log and twin in the log's unit, standard deviations as such."""
        columns = []
        for moments, covariance in (
            (self.log_moments, self.log_covariance),
            (self.moments_of(response, self.counted), self._covariance(response)),
        ):
            scale = np.full(moments.size, self.unit)
            scale[2:4] *= np.exp(moments[2:4])
            shown = np.where(np.arange(moments.size) // 2 == 1, scale, moments * scale)
            columns += [shown, np.sqrt(np.diag(covariance)) * scale]
        return tuple(
            Moment(name, *map(float, row)) for name, *row in zip(_MOMENTS, *columns, strict=True)
        )


def _sent(
    scenario: Scenario,
    treated: NDArray[np.bool_],
    stream: np.random.SeedSequence,
    candidates: NDArray[np.int32] | None = None,
) -> _Run:
    """Send the scenario's traces through it, one for each arm given.

    At servers that share nobody comes after the last of them.
    """
    if scenario.discipline == FCFS:
        return _Run(*run_traces(scenario, treated, stream, candidates))
    n = treated.size
    arrival = np.asarray(scenario.arrivals.times)[:n]  # type: ignore[union-attr]
    service = np.asarray(scenario.service.requirements)[:n] / scenario.rates[0]  # type: ignore[union-attr]
    traces = TaskLog(
        arrival=arrival,
        departure=arrival + service,
        treated=treated,
        server=np.zeros(n, np.int32),  # so that requirements are those of the trace
        service_time=service,
    )
    assert isinstance(stream.entropy, int)
    log = replay(scenario, traces, treated, (stream.entropy, *stream.spawn_key))
    assert log.server is not None
    return _Run(log.response_time, log.server)


# --------------------------------------------------------------------------------------------------
# Delays
# --------------------------------------------------------------------------------------------------


def _delays(fit: _Fit) -> _Delays:
    """Find the delays between dispatcher and servers, none where none are needed."""
    none = _Delays(0.0, 0.0)
    if fit.discipline != FCFS:
        return none
    log = fit.log
    dispatch = None
    if log.service_time is not None:
        # A task that met an idle server has waited for nothing else.
        start = fit._start(0.0)
        idle = start == log.arrival
        if idle.any():
            late = float(np.median((log.departure - log.service_time - start)[idle]))
            least = max(_NO_DELAY * fit.unit, 2.0 * fit.who.tick)
            dispatch = late if late > least else 0.0
            none = none._replace(dispatch=dispatch)
    if fit.candidates is not None:
        if fit.agreement(none) > _LEAST_AGREEMENT:
            return none

        def cost(delays: _Delays, stop: int | None = None) -> float:
            return 1.0 - fit.agreement(delays, stop)
    else:
        if fit.misfit(fit.run(none).response) <= _chi_square(len(_MOMENTS), _SEARCH_FROM):
            return none

        def cost(delays: _Delays, stop: int | None = None) -> float:
            return fit.misfit(fit.run(delays, stop=stop).response)

    last = _LAST_STEPS if fit.candidates is None else _LAST_STEPS_BY_CHOICES
    few = fit.first + max((fit.stop - fit.first) // 4, min(_COARSE_TASKS, fit.stop - fit.first))
    found = _search(
        cost,
        lambda delays: cost(delays, few),
        dispatch,
        float(log.response_time.min()),
        fit.unit,
        last,
    )
    if fit.candidates is None:
        free = 2 if dispatch is None else 1
        # More parameters always fit better: by that much without being there.
        if cost(none) - cost(found) < _chi_square(free, _SEARCH_FROM):
            return none
        found = found._replace(fitted=(dispatch is None, True))
    return found


def _search(
    cost: Callable[[_Delays], float],
    coarse: Callable[[_Delays], float],
    dispatch: float | None,
    most: float,
    unit: float,
    last: tuple[float, float],
) -> _Delays:
    """Find the delays of least cost, on a grid by a coarse cost, and from there in smaller steps.

    A dispatch delay that is not given is sought up to `most`, the shortest response: no task can
    have been on its way for longer.
    """
    known: dict[_Delays, float] = {}

    def cost_at(share: float, information: float) -> float:
        delays = at(share, information)
        if delays not in known:
            known[delays] = cost(delays)
        return known[delays]

    def at(share: float, information: float) -> _Delays:
        return _Delays(share * most if dispatch is None else dispatch, information * unit)

    shares = _DISPATCHES if dispatch is None else (0.0,)
    best = min(((s, i) for s in shares for i in _INFORMATION), key=lambda p: coarse(at(*p)))
    steps = list(_STEPS)
    moving = [axis for axis in (0, 1) if axis == 1 or dispatch is None]
    while any(steps[axis] >= last[axis] for axis in moving):
        stays = True
        for axis in moving:
            for step in (steps[axis], -steps[axis]):
                point = list(best)
                # Rounded, so that a step back ends where it began, and at zero exactly.
                point[axis] = round(max(point[axis] + step, 0.0), 6)
                point[0] = min(point[0], 1.0)
                if cost_at(*point) < cost_at(*best):
                    best, stays = (point[0], point[1]), False
        if stays:
            steps = [step / 2.0 for step in steps]
    return at(*best)


def _variances_from_delays(fit: _Fit, delays: _Delays, policy: Policy) -> NDArray[np.float64]:
    """Return what the error of fitted delays adds to the variances of effect and mean, shape (2,).

    With G and h the derivatives of the moments and of a figure, the delays that make J least have
    the covariance (G' V^-1 G)^-1, and the figure h' (G' V^-1 G)^-1 h from it.
    """
    most = float(fit.log.response_time.min())
    of_moments, of_figures = [], []
    for axis, fitted in enumerate(delays.fitted):
        if not fitted:
            continue
        here = (delays.dispatch, delays.information)[axis]
        step = _DERIVATIVE_STEP * fit.unit
        ends = [max(here - step, 0.0), min(here + step, most) if axis == 0 else here + step]
        if ends[1] <= ends[0]:
            continue
        sides = [
            delays._replace(dispatch=end) if axis == 0 else delays._replace(information=end)
            for end in ends
        ]
        width = ends[1] - ends[0]
        moments = [fit.moments_of(fit.run(side).response, fit.counted) for side in sides]
        of_moments.append((moments[1] - moments[0]) / width)
        figures = [fit.figures(side, policy) for side in sides]
        of_figures.append((figures[1] - figures[0]) / width)
    if not of_moments:
        return np.zeros(2)
    g, h = np.array(of_moments).T, np.array(of_figures)
    covariance = h.T @ np.linalg.pinv(g.T @ fit.weights @ g, hermitian=True) @ h
    return np.diag(covariance)


def _variances_from_tick(fit: _Fit, delays: _Delays, policy: Policy) -> NDArray[np.float64]:
    """Return what a clock in whole ticks adds to the variances of effect and mean, shape (2,).

    Lengths may all be short by half a tick, or long. And a dispatcher that knows departures to the
    tick sees those of its own tick all or, half a tick later, none, with the truth in the middle.
    What either changes counts as one standard deviation.
    """
    half = 0.5 * fit.who.tick
    if half == 0.0:
        return np.zeros(2)
    longer = dataclasses.replace(fit.log, departure=fit.log.departure + half)
    other = _Fit(longer, fit.who, fit.control, fit.treatment, fit.seed, fit.method)
    here = fit.figures(delays, policy)
    later = delays._replace(information=delays.information + half)
    by_length = other.figures(delays, policy) - here
    by_order = 0.0 if fit.discipline != FCFS else 0.5 * (fit.figures(later, policy) - here)
    variances: NDArray[np.float64] = by_length**2 + by_order**2
    return variances


# --------------------------------------------------------------------------------------------------
# Passes under either arm
# --------------------------------------------------------------------------------------------------


class _Passes(NamedTuple):
    """What a policy does by pass and block, and which blocks met there."""

    difference: NDArray[np.float64]  # (K, B) mean response under it less that under control
    response: NDArray[np.float64]  # (K, B) mean response under it
    gaps: NDArray[np.int64]  # (K, B) block of gaps at each place
    requirements: NDArray[np.int64]  # (K, B)
    loads: Loads


def _passes(fit: _Fit, delays: _Delays, policy: Policy) -> _Passes:
    """Run the twin with control and with a policy for all, in the log's order and in others."""
    scenario = fit.scenario(delays).replace(treatment=policy)
    size = (fit.stop - fit.first) // _BLOCKS
    start = fit.stop - size * _BLOCKS
    arrival, stop = fit.log.arrival, fit.stop
    requirement = np.asarray(scenario.service.requirements)  # type: ignore[union-attr]
    gap = np.diff(arrival, prepend=arrival[0])
    span = float(arrival[stop - 1] - arrival[start - 1])

    def in_order(values: NDArray[np.float64], blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        rows = values[start:stop].reshape(_BLOCKS, size)[blocks]
        return np.concatenate((values[:start], rows.ravel(), values[stop:]))

    means, orders, works = [], [], []
    for k, stream in enumerate(fit.streams[1 : _PASSES + 1]):
        if k == 0:
            order = np.tile(np.arange(_BLOCKS), (2, 1))
            changed = scenario
            runs = fit.alone(delays, policy)
        else:
            draw = np.random.Generator(np.random.Philox(stream.spawn(1)[0]))
            order = np.array([draw.permutation(_BLOCKS) for _ in range(2)])
            changed = scenario.replace(
                arrivals=ArrivalTrace(arrival[0] + np.cumsum(in_order(gap, order[0]))),
                service=ServiceTrace(in_order(requirement, order[1])),
            )
            arms = (np.full(fit.length, arm) for arm in (False, True))
            runs = [_sent(changed, arm, stream) for arm in arms]
        work = np.asarray(changed.service.requirements)[start:stop]  # type: ignore[union-attr]
        works.append(
            [np.bincount(run.server[start:stop], work, minlength=fit.who.number) for run in runs]
        )
        zero, one = (run.response[start:stop].reshape(_BLOCKS, size) for run in runs)
        means.append(((one - zero).mean(axis=1), one.mean(axis=1)))
        orders.append(order)
    gaps, requirements = np.array(orders).transpose(1, 0, 2)
    control, treatment = np.mean(works, axis=0) / span / scenario.rates
    difference, response = np.array(means).transpose(1, 0, 2)
    return _Passes(difference, response, gaps, requirements, Loads(control, treatment))


def _crossed_variance(values: NDArray[np.float64], passes: _Passes) -> float:
    """Return the variance of the mean of values (K, B), from blocks of gaps and of requirements.

    See `log_twin`. The part of pairing and candidates alone is T/K, and the other two are no less
    than zero: so the whole is at least that.
    """
    apart = values - values.mean()
    k, b = apart.shape
    within = apart - apart.mean(axis=1, keepdims=True)
    total = float(np.sum(within**2) / (k * (b - 1)))

    def of_means(blocks: NDArray[np.int64]) -> float:
        means = np.bincount(blocks.ravel(), apart.ravel(), minlength=b) / k
        return float(np.sum(means**2) / (b - 1))

    crossed = of_means(passes.gaps) + of_means(passes.requirements) - total / k
    return float(max(crossed, total / k) / b)


# --------------------------------------------------------------------------------------------------
# Tests of fit
# --------------------------------------------------------------------------------------------------


def _chi_square(degrees: int, probability: float) -> float:
    """Return what a chi-square variable exceeds with a probability."""
    from scipy.special import chdtri  # here, so that importing qdq stays quick

    return float(chdtri(degrees, probability))


def _tests(
    fit: _Fit, delays: _Delays, twin: _Run, loads: Loads, names: tuple[str, str]
) -> tuple[ByQueue, tuple[FitTest, ...]]:
    """Test the fit, and return requirements by queue length too."""
    relative = fit.relative(delays.dispatch)
    queue = fit.queue_at_joining(delays.dispatch)
    time = fit.service(delays.dispatch).time
    tests = [
        _test_of(
            "moments",
            fit.misfit(twin.response),
            _chi_square(len(_MOMENTS), _DISTRUST_FROM),
            "the twin, run as the log was, has {} response times",
            ("the log's", "other"),
        ),
        *_tests_of_requirements(fit, time, queue),
        _test_of_load(loads, names),
        *_tests_of_columns(fit, delays),
    ]
    return _by_queue(queue[fit.counted], relative[fit.counted]), tuple(tests)


def _test_of(
    name: str,
    value: float,
    threshold: float,
    meaning: str,
    words: tuple[str, str],
    *,
    at_least: bool = False,
) -> FitTest:
    """Return a test with what its outcome means: `words` if it holds and if it fails."""
    passed = value > threshold if at_least else abs(value) <= threshold
    return FitTest(name, value, threshold, passed, meaning.format(words[0 if passed else 1]))


def _tests_of_requirements(
    fit: _Fit, time: NDArray[np.float64], queue: NDArray[np.int64]
) -> Iterator[FitTest]:
    found = rebuild.exogeneity(fit.log, fit.who, time, queue, fit.counted)
    what = {
        "queue": "the queue that the task joins",
        "arm": "the arm",
        "previous": "that of the task before",
    }
    for name, t in found.items():
        meaning = f"what a task asks of its server {{}} on {what[name]}"
        words = ("does not depend", "depends")
        yield _test_of(f"requirement_and_{name}", t, rebuild.MOST_T, meaning, words)


def _test_of_load(loads: Loads, names: tuple[str, str]) -> FitTest:
    at = [int(np.argmax(arm)) for arm in loads]
    arm = max((0, 1), key=lambda k: loads[k][at[k]])
    value = float(loads[arm][at[arm]])
    deployed = f"server {at[arm]} under {names[arm]} alone, the busiest of all, "
    if value >= 1.0:
        deployed += "gets more work than it can do: there is no steady state"
    else:
        deployed += "{}"
    words = ("has room to spare", "is too close to being overloaded")
    return _test_of("load", value, MOST_LOAD, deployed, words)


def _tests_of_columns(fit: _Fit, delays: _Delays) -> Iterator[FitTest]:
    log = fit.log
    spread = float(np.std(log.response_time[fit.counted])) or 1.0
    if log.service_time is not None:
        apart = (log.service_time - fit.service(delays.dispatch).time)[fit.counted]
        meaning = "service times rebuilt from departures {} those logged"
        ratio = float(np.std(apart)) / spread
        # Up to four times are rounded: arrival, two departures, and the service time.
        most = math.hypot(_MOST_APART, fit.who.tick * math.sqrt(4.0 / 12.0) / spread)
        yield _test_of("service_times", ratio, most, meaning, ("are", "are not"))
    if fit.candidates is not None:
        server = fit.who.joined.copy()
        server[fit.counted] = fit.sent_to(delays)
        service = fit.service(delays.dispatch)
        response = rebuild.response_at(
            log, fit.who, server, service.time, service.rates.rate, delays.dispatch
        )
        apart = (log.response_time - response)[fit.counted]
        yield _test_of(
            "responses",
            float(np.mean(np.abs(apart))) / spread,
            _MOST_APART,
            "sent where the log's queues and candidates tell, tasks {} response times",
            ("have the log's", "have other"),
        )
        yield _test_of(
            "choices",
            float(np.mean(server == fit.who.joined)),
            _LEAST_AGREEMENT,
            "with the log's candidates, the policies send tasks {} they went",
            ("where", "elsewhere than"),
            at_least=True,
        )


def _by_queue(queue: NDArray[np.int64], relative: NDArray[np.float64]) -> ByQueue:
    count, total, squares = (
        np.bincount(queue, weights) for weights in (None, relative, relative**2)
    )
    length = np.flatnonzero(count >= _FEWEST_OF_A_LENGTH)
    count, total, squares = count[length], total[length], squares[length]
    mean = total / count
    variance = np.maximum(squares / count - mean**2, 0.0) / (count - 1)
    return ByQueue(length, mean, np.sqrt(variance))


# --------------------------------------------------------------------------------------------------
# Where the twin is not trusted
# --------------------------------------------------------------------------------------------------


def _fallback(fit: _Fit, twin: _Twinned, level: float) -> tuple[Fallback, Scores, list[str]]:
    """Correct the twin's effect by the difference in DQ between the log and the twin.

    The twin is run with arms and candidates drawn anew. With the log's own arms, requirements that
    do depend on the queue would bring the log's effect into the twin's DQ, where it cancels. The
    windows of both have the same gaps and requirements, so the error is that of their difference.
    Returned too is what makes the log's scores doubtful.
    """
    log, first, stop, delays = fit.log, fit.first, fit.stop, twin.delays
    rate = (log.n_tasks - 1) / float(log.arrival[-1] - log.arrival[0])
    longest = (stop - first) // (2 * _BLOCKS)
    time = fit.service(delays.dispatch).time
    horizon = max(1, min(int(30.0 * rate * float(np.mean(time))), longest))
    scenario = fit.scenario(delays)
    requirement = np.asarray(scenario.service.requirements)  # type: ignore[union-attr]
    counted = log.treated[fit.counted]
    share = float(np.mean(counted)) if log.propensity is None else log.propensity

    def part(run: _Run, treated: NDArray[np.bool_], time: NDArray[np.float64]) -> TaskLog:
        return TaskLog(
            arrival=log.arrival[:stop],
            departure=log.arrival[:stop] + run.response[:stop],
            treated=treated[:stop],
            server=run.server[:stop],
            service_time=time[:stop],
            propensity=share,
            n_servers=fit.who.number,
            skip=float(log.arrival[first] - log.arrival[0]),
            scenario=scenario if delays.dispatch or delays.information else None,
        )

    parts = [part(_Run(log.response_time, fit.who.joined), log.treated, time)]
    for stream in fit.streams[_PASSES + 1 :]:
        draw = np.random.Generator(np.random.Philox(stream.spawn(1)[0]))
        arms = draw.random(fit.length) < share
        run = _sent(scenario, arms, stream)
        work = requirement[: arms.size] / scenario.rates[run.server]
        parts.append(part(run, arms, work))

    exogenous = all(test.passed for test in twin.tests if test.name.startswith("requirement"))
    policies = fit.control, fit.treatment
    doubts: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        try:
            plain = score.scored(parts[0], *policies, horizon, False, level)
            doubts = [str(one.message) for one in said if one.category is UserWarning]
            rich = score.scored(parts[0], *policies, horizon, True, level) if exogenous else None
            found = [score.scored(x, *policies, horizon, exogenous, level) for x in parts[1:]]
        except ValueError:  # no probability of a choice can be had for a policy
            scores, method = Scores(None, None), "dq_response"
            estimates = [dq_response(x, horizon=horizon) for x in parts]
            variances = np.array([one.standard_error**2 for one in estimates])
            apart = Spread(
                float(variances[0] + variances[1:].sum() / _PASSES**2),
                min(one.degrees_of_freedom for one in estimates),
            )
        else:
            scores, method = Scores(plain[0], rich[0] if rich else None), "dq_score"
            estimates = [one for one, _ in (rich or plain, *found)]
            differences = (rich or plain)[1] - np.mean([values for _, values in found], axis=0)
            apart = score.spread_of_mean(differences, counted[: differences.size], "hac")
    dq_log, *dq_twin = (one.value for one in estimates)
    return (
        Fallback(
            value=twin.effect.value + dq_log - float(np.mean(dq_twin)),
            standard_error=math.sqrt(twin.effect.standard_error**2 + apart.variance),
            degrees_of_freedom=min(_BLOCKS - 1, apart.degrees_of_freedom),
            dq_log=dq_log,
            dq_twin=float(np.mean(dq_twin)),
            horizon=horizon,
            method=method,
        ),
        scores,
        doubts,
    )
