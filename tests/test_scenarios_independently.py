"""Every scenario of the book, simulated a second time by a model that shares nothing with qdq.

The model is written for SimPy, with Python's own random numbers: its dispatcher knows of servers
what messages tell, which take the information delay. Compared are the
mean response times under control, under treatment, and of either arm of a half-and-half mix, all
from tasks that arrive in a window of the same length; and the true effect. Where exact values are
known, they are computed here anew.

All comparisons together give a false alarm with a probability below `FALSE_ALARM`, each having an
equal part, by Student's law with Welch's degrees of freedom. Seeds are fixed on both sides.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import solve_ivp
from scipy.sparse import csr_array

import qdq

pytestmark = pytest.mark.long

FALSE_ALARM = 1e-4
COMPARISONS = 120  # or fewer, in the whole file
# What is told from zero is at most this share of a mean response.
RESOLUTION = 0.03

WINDOW, BURN_IN = 800.0, 160.0  # whole cycles of the periodic rate
SIMPY_REPLICATIONS, QDQ_REPLICATIONS = 32, 400

FAST_AND_SLOW = (0.6,) * 5 + (1.4,) * 5
SPREAD = tuple(np.linspace(0.5, 1.5, 10).tolist())
SYSTEMS: dict[str, dict[str, Any]] = {
    "homogeneous": {"control": qdq.PowerOfD(1), "treatment": qdq.PowerOfD(2)},
    "two classes": {"service_rates": FAST_AND_SLOW},
    "expected delay": {"service_rates": SPREAD, "treatment": qdq.ShortestExpectedDelay(3)},
    "periodic": {"arrivals": qdq.Periodic(0.7, 0.9, 40.0)},
    "information delay": {"information_delay": 2.0},
    "own dispatches": {"information_delay": 2.0, "counts_own_dispatches": True},
    "dispatch delay": {"information_delay": 0.4, "dispatch_delay": 1.0},
    "both delays, own dispatches": {
        **{"information_delay": 0.4, "dispatch_delay": 1.0, "counts_own_dispatches": True}
    },
    "deterministic": {"service": qdq.Deterministic()},
    "Pareto": {"service": qdq.Pareto(2.5)},
    "shortest queue": {"treatment": qdq.JoinShortestQueue()},
    "idle queue": {"treatment": qdq.JoinIdleQueue()},
    "round robin": {"treatment": qdq.RoundRobin()},
    "least work": {"treatment": qdq.LeastWorkLeft()},
}
SHARES = {"control": 0.0, "treatment": 1.0, "mix": 0.5}


def scenario_of(name: str) -> qdq.Scenario:
    return qdq.Scenario(**({"n_servers": 10, "arrivals": qdq.Poisson(0.7)} | SYSTEMS[name]))


# --------------------------------------------------------------------------------------------------
# The other model
# --------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    arrival: float
    arm: int
    service: float


def drawer(law: qdq.scenario.Service, rng: random.Random) -> Callable[[], float]:
    """What draws a requirement."""
    if isinstance(law, qdq.Exponential):
        return lambda: rng.expovariate(1.0)
    if isinstance(law, qdq.Deterministic):
        return lambda: 1.0
    assert isinstance(law, qdq.Pareto)
    return lambda: rng.paretovariate(law.shape) * (law.shape - 1.0) / law.shape


def simpy_means(name: str, share: float, seed: int) -> tuple[float, float]:
    """Mean response of either arm of one run, NaN for an arm without tasks."""
    import simpy

    scenario = scenario_of(name)
    rng = random.Random(seed)
    draw = drawer(scenario.service, rng)
    n, rates = scenario.n_servers, scenario.rates.tolist()
    environment = simpy.Environment()
    seen = [0] * n  # tasks at each server, as the dispatcher knows
    messages: deque[tuple[float, int, int]] = deque()  # when read, server, change
    queues = [deque[Task]() for _ in range(n)]  # whoever has joined, first the one in service
    begun = [0.0] * n
    total, count = [0.0, 0.0], [0, 0]

    def report(server: int, change: int) -> None:
        messages.append((environment.now + scenario.information_delay, server, change))

    def begin(server: int) -> None:
        begun[server] = environment.now
        service = environment.timeout(queues[server][0].service, server)
        service.callbacks.append(end)

    def end(event: simpy.Event) -> None:
        server = event.value
        task = queues[server].popleft()
        report(server, -1)
        if task.arrival >= BURN_IN:
            total[task.arm] += environment.now - task.arrival
            count[task.arm] += 1
        if queues[server]:
            begin(server)

    def join(event: simpy.Event) -> None:
        server, task = event.value
        queues[server].append(task)
        if not scenario.counts_own_dispatches:
            report(server, 1)
        if len(queues[server]) == 1:
            begin(server)

    def work(server: int) -> float:
        tasks = queues[server]
        return sum(task.service for task in tasks) - (environment.now - begun[server]) * bool(tasks)

    def chooser(policy: qdq.policies.Policy) -> Callable[[], int]:
        """What chooses for one arm; the sample is in random order, so that ties are random."""
        anyone = range(n)
        if isinstance(policy, qdq.ShortestExpectedDelay):
            expected = lambda s: (seen[s] + 1) / rates[s]  # noqa: E731
            return lambda: min(rng.sample(anyone, policy.d), key=expected)
        if isinstance(policy, qdq.PowerOfD):
            return lambda: min(rng.sample(anyone, policy.d), key=seen.__getitem__)
        if isinstance(policy, qdq.JoinShortestQueue):
            return lambda: min(rng.sample(anyone, n), key=seen.__getitem__)
        if isinstance(policy, qdq.JoinIdleQueue):
            return lambda: rng.choice([s for s in anyone if seen[s] == 0] or anyone)
        if isinstance(policy, qdq.LeastWorkLeft):
            return lambda: min(rng.sample(anyone, n), key=work)
        assert isinstance(policy, qdq.RoundRobin)
        return functools.partial(next, itertools.cycle(anyone))

    def dispatch() -> Generator[simpy.Event, None, None]:
        choose = chooser(scenario.control), chooser(scenario.treatment)
        arrivals = scenario.arrivals
        amplitude = getattr(arrivals, "amplitude", 0.0)
        fastest = n * arrivals.rate * (1.0 + amplitude)
        while environment.now < BURN_IN + WINDOW:
            yield environment.timeout(rng.expovariate(fastest))
            now = environment.now
            if amplitude:
                wave = math.sin(2.0 * math.pi * now / arrivals.period)
                if rng.random() * (1.0 + amplitude) > 1.0 + amplitude * wave:
                    continue
            while messages and messages[0][0] <= now:
                _, server, change = messages.popleft()
                seen[server] += change
            arm = int(rng.random() < share)
            server = choose[arm]()
            if scenario.counts_own_dispatches:
                seen[server] += 1
            task = Task(now, arm, draw() / rates[server])
            journey = environment.timeout(scenario.dispatch_delay, (server, task))
            journey.callbacks.append(join)

    environment.process(dispatch())
    environment.run()
    return tuple(t / c if c else math.nan for t, c in zip(total, count, strict=True))


def qdq_means(scenario: qdq.Scenario, share: float, replications: int, seed: int) -> np.ndarray:
    """Mean response of either arm, NaN for an arm without tasks: a row a replication."""
    designs = {0.0: qdq.AllControl(), 1.0: qdq.AllTreatment()}
    expected = scenario.total_arrival_rate * WINDOW
    n_tasks = math.ceil(expected + 8.0 * math.sqrt(expected))
    rows = []
    for j in range(replications):
        log = qdq.simulate(scenario, designs.get(share) or qdq.Bernoulli(share), n_tasks, (seed, j))
        assert log.arrival[-1] > WINDOW
        inside = log.arrival < WINDOW
        arms = [log.response_time[inside & (log.treated == arm)] for arm in (False, True)]
        rows.append([arm.mean() if arm.size else math.nan for arm in arms])
    return np.array(rows)


# --------------------------------------------------------------------------------------------------
# Comparisons
# --------------------------------------------------------------------------------------------------


def error_of(sample: np.ndarray) -> float:
    return float(np.std(sample, ddof=1)) / math.sqrt(sample.size)


def assert_close(value: float, other: float, errors: tuple[float, float], df: float) -> None:
    """Assert that two independent means agree, and that errors are small enough to tell."""
    error = math.hypot(*errors)
    tolerance = float(stats.t.isf(FALSE_ALARM / COMPARISONS / 2, df)) * error
    assert tolerance < RESOLUTION * abs(other)
    assert abs(value - other) < tolerance, f"{(value - other) / error:.2f} standard errors"


def assert_same_mean(sample: np.ndarray, other: np.ndarray) -> None:
    errors = error_of(sample), error_of(other)
    variances = np.square(errors)
    df = variances.sum() ** 2 / np.sum(variances**2 / [sample.size - 1, other.size - 1])
    assert_close(sample.mean(), other.mean(), errors, df)


def assert_mean_is(sample: np.ndarray, exact: float) -> None:
    assert_close(sample.mean(), exact, (error_of(sample), 0.0), sample.size - 1)


@pytest.fixture(scope="module")
def simpy_runs() -> Iterator[dict[tuple[str, str], list[Future[tuple[float, float]]]]]:
    """All runs of the other model, made on every core while tests go on."""
    pytest.importorskip("simpy")
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"))
    runs, seed = {}, 0
    for name in SYSTEMS:
        for which, share in SHARES.items():
            seeds = range(seed, seed + SIMPY_REPLICATIONS)
            runs[name, which] = [pool.submit(simpy_means, name, share, s) for s in seeds]
            seed += SIMPY_REPLICATIONS
    yield runs
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", SYSTEMS)
def test_another_simulator_finds_the_same_means(name, simpy_runs):
    scenario = scenario_of(name)
    other, mine = {}, {}
    for place, (which, share) in enumerate(SHARES.items()):
        other[which] = np.array([run.result() for run in simpy_runs[name, which]])
        mine[which] = qdq_means(scenario, share, QDQ_REPLICATIONS, seed=place)
    for which, arm in (("control", 0), ("treatment", 1), ("mix", 0), ("mix", 1)):
        assert_same_mean(mine[which][:, arm], other[which][:, arm])
    # The true effect has its tolerance from control's response, not from its own size.
    truth = qdq.true_effect(scenario, relative_error=0.1, seed=7, n_jobs=2)
    effect = other["treatment"][:, 1].mean() - other["control"][:, 0].mean()
    errors = truth.standard_error, error_of(other["treatment"][:, 1]), error_of(other["control"][:, 0])
    control = truth.mean_response_control
    assert_close(
        control + truth.value, control + effect, (errors[0], math.hypot(*errors[1:])), 2 * 31
    )
