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
COMPARISONS = 110  # in the whole file, or fewer
# A difference of this share of a mean response must not pass.
RESOLUTION = 0.06

WINDOW, BURN_IN = 800.0, 160.0  # whole cycles of the periodic rate
SIMPY_REPLICATIONS, QDQ_REPLICATIONS = 24, 400

FAST_AND_SLOW = (0.6,) * 5 + (1.4,) * 5
SPREAD = tuple(np.linspace(0.5, 1.5, 10).tolist())
SYSTEMS: dict[str, dict[str, Any]] = {
    "homogeneous": {},
    "two classes": {"service_rates": FAST_AND_SLOW},
    "expected delay": {"service_rates": SPREAD, "treatment": qdq.ShortestExpectedDelay(3)},
    "periodic": {"arrivals": qdq.Periodic(0.6, 0.7, 40.0)},
    "information delay": {"information_delay": 2.0},
    "own dispatches": {"information_delay": 2.0, "counts_own_dispatches": True},
    "dispatch delay": {"information_delay": 0.4, "dispatch_delay": 1.0},
    "deterministic": {"service": qdq.Deterministic()},
    "Pareto": {"service": qdq.Pareto(2.5)},
    "shortest queue": {"treatment": qdq.JoinShortestQueue()},
    "idle queue": {"treatment": qdq.JoinIdleQueue()},
    "round robin": {"arrivals": qdq.Poisson(0.6), "treatment": qdq.RoundRobin()},
    "least work": {"treatment": qdq.LeastWorkLeft()},
}
SHARES = {"control": 0.0, "treatment": 1.0, "mix": 0.5}


def scenario_of(name: str) -> qdq.Scenario:
    return qdq.Scenario(**({"n_servers": 10, "arrivals": qdq.Poisson(0.7)} | SYSTEMS[name]))


# --------------------------------------------------------------------------------------------------
# The other model
# --------------------------------------------------------------------------------------------------


Row = tuple[float, float, int, float]


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


def simpy_run(name: str, share: float, seed: int) -> Row:
    """Mean response of either arm, NaN for an arm without tasks, and two things of known mean."""
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
    total, count, needed = [0.0, 0.0], [0, 0], [0.0]

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
            needed[0] += task.service * rates[server]
        if queues[server]:
            begin(server)

    def join(server: int, task: Task) -> None:
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
            if scenario.dispatch_delay == 0.0:
                join(server, task)
            else:
                journey = environment.timeout(scenario.dispatch_delay, (server, task))
                journey.callbacks.append(lambda event: join(*event.value))

    environment.process(dispatch())
    environment.run()
    means = [t / c if c else math.nan for t, c in zip(total, count, strict=True)]
    return *means, sum(count), needed[0] / sum(count)


def qdq_runs(scenario: qdq.Scenario, share: float, replications: int, seed: int) -> np.ndarray:
    """The same of qdq's simulator, a row a replication."""
    designs = {0.0: qdq.AllControl(), 1.0: qdq.AllTreatment()}
    expected = scenario.total_arrival_rate * WINDOW
    n_tasks = math.ceil(expected + 8.0 * math.sqrt(expected))
    rows = []
    for j in range(replications):
        design = designs.get(share) or qdq.Bernoulli(share)
        log = qdq.simulate(scenario, design, n_tasks, (seed, j), record=["service_time"])
        assert log.arrival[-1] > WINDOW
        inside = log.arrival < WINDOW
        arms = [log.response_time[inside & (log.treated == arm)] for arm in (False, True)]
        requirement = (log.service_time * scenario.rates[log.server])[inside]
        means = [arm.mean() if arm.size else math.nan for arm in arms]
        rows.append([*means, inside.sum(), requirement.mean()])
    return np.array(rows)


# --------------------------------------------------------------------------------------------------
# Comparisons
# --------------------------------------------------------------------------------------------------


class Mean(NamedTuple):
    value: float
    error: float
    df: float


def mean_of(scenario: qdq.Scenario, runs: np.ndarray, arm: int) -> Mean:
    """Mean over runs, with what least squares explains by numbers of tasks and requirements."""
    known = scenario.total_arrival_rate * WINDOW, scenario.service.mean
    x = np.column_stack((np.ones(len(runs)), runs[:, 2:] / known - 1.0))
    if np.ptp(x[:, 2]) < 1e-9:
        x = x[:, :2]
    df = len(x) - x.shape[1]
    inverse = np.linalg.inv(x.T @ x)
    beta = inverse @ x.T @ runs[:, arm]
    variance = float(np.sum((runs[:, arm] - x @ beta) ** 2)) / df
    return Mean(float(beta[0]), math.sqrt(variance * inverse[0, 0]), df)


def effect_of(truth: qdq.TrueEffect) -> Mean:
    return Mean(truth.value, truth.standard_error, truth.n_replications - 3)


def exactly(value: float) -> Mean:
    return Mean(value, 0.0, 1)


def assert_same(one: Mean, other: Mean, scale: float) -> None:
    """Assert that two independent means agree, and that a difference would be seen."""
    error = math.hypot(one.error, other.error)
    df = error**4 / (one.error**4 / one.df + other.error**4 / other.df)
    tolerance = float(stats.t.isf(FALSE_ALARM / COMPARISONS / 2.0, df)) * error
    assert tolerance < RESOLUTION * scale
    assert abs(one.value - other.value) < tolerance, f"{one} and {other}"


@pytest.fixture(scope="module")
def simpy_runs() -> Iterator[dict[tuple[str, str], list[Future[Row]]]]:
    """All runs of the other model, made on every core while tests go on."""
    pytest.importorskip("simpy")
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"))
    seeds = itertools.count()
    yield {
        (name, which): [
            pool.submit(simpy_run, name, share, next(seeds)) for _ in range(SIMPY_REPLICATIONS)
        ]
        for name in SYSTEMS
        for which, share in SHARES.items()
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", SYSTEMS)
def test_another_simulator_finds_the_same_means(name, simpy_runs):
    scenario = scenario_of(name)
    found, all_ours = {}, []
    for seed, (which, share) in enumerate(SHARES.items()):
        theirs = np.array([run.result() for run in simpy_runs[name, which]])
        ours = qdq_runs(scenario, share, QDQ_REPLICATIONS, seed)
        all_ours.append(ours)
        for arm in (0, 1):
            if np.isfinite(theirs[:, arm]).all():
                one, other = (mean_of(scenario, runs, arm) for runs in (ours, theirs))
                assert_same(one, other, other.value)
                found[which, arm] = other
    assert list(found) == [("control", 0), ("treatment", 1), ("mix", 0), ("mix", 1)]
    # What means were corrected for must itself be right.
    for column, known in ((2, scenario.total_arrival_rate * WINDOW), (3, scenario.service.mean)):
        values = np.concatenate([runs[:, column] for runs in all_ours])
        if np.ptp(values) > 1e-9:
            error = np.std(values, ddof=1) / math.sqrt(values.size)
            assert_same(Mean(values.mean(), error, values.size - 1), exactly(known), known)
        else:
            assert values[0] == pytest.approx(known, rel=1e-12)

    control, treated = found["control", 0], found["treatment", 1]
    error = math.hypot(control.error, treated.error)
    truth = qdq.true_effect(scenario, relative_error=0.1, seed=7, n_jobs=2)
    effect = Mean(treated.value - control.value, error, control.df)
    assert_same(effect_of(truth), effect, control.value)


# --------------------------------------------------------------------------------------------------
# Exact values
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [1.0, (0.9,) * 5 + (1.4,) * 5], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    ("service", "second_moment"),
    [
        (qdq.Exponential(), 2.0),
        (qdq.Deterministic(), 1.0),
        # a m^2 / (a - 2) with a = 2.5 and the least m = 1.5 / 2.5.
        (qdq.Pareto(2.5), 2.5 * 0.36 / 0.5),
    ],
    ids=["M/M/1", "M/D/1", "Pareto"],
)
def test_random_routing_has_the_response_of_pollaczek_and_khinchine(service, second_moment, rates):
    scenario = qdq.Scenario(
        n_servers=10,
        arrivals=qdq.Poisson(0.7),
        service=service,
        service_rates=rates,
        control=qdq.PowerOfD(1),
    )
    waits = [0.7 * second_moment / r**2 / (2.0 * (1.0 - 0.7 / r)) for r in scenario.rates]
    exact = float(np.mean(1.0 / scenario.rates + waits))
    truth = qdq.true_effect(scenario, relative_error=0.05, seed=7, n_jobs=2)
    assert truth.method == "partly exact"
    assert truth.mean_response_control == pytest.approx(exact, rel=1e-12)
    assert truth.value == pytest.approx(truth.mean_response_treatment - exact, rel=1e-12)
    if not isinstance(service, qdq.Pareto):  # whose means have an infinite variance here
        ours = mean_of(scenario, qdq_runs(scenario, 0.0, QDQ_REPLICATIONS, 3), 0)
        assert_same(ours, exactly(exact), exact)


def central_queue(servers: int, rate: float, deterministic: bool) -> float:
    """Mean response of M/M/c (Erlang) and of M/D/c (Crommelin), with services of mean 1."""
    if not deterministic:
        terms = np.cumprod([1.0, *(rate / k for k in range(1, servers + 1))])
        last = terms[-1] * servers / (servers - rate)
        return 1.0 + last / (terms[:-1].sum() + last) / (servers - rate)
    # Whoever is in service now has left a service time later, and nobody else: with q tasks in
    # system there are then max(q - c, 0) and a Poisson number.
    size = 40 * servers
    arrivals = stats.poisson.pmf(np.arange(size), rate)
    law = arrivals
    for _ in range(2_000):
        stay = np.append(law[: servers + 1].sum(), law[servers + 1 :])
        law = np.convolve(stay, arrivals)[:size]
    return 1.0 + float(np.maximum(np.arange(size) - servers, 0) @ law) / rate


@pytest.mark.parametrize("service", [qdq.Exponential(), qdq.Deterministic()], ids=repr)
def test_least_work_left_is_one_queue_for_all_servers(service):
    scenario = qdq.Scenario(
        n_servers=10,
        arrivals=qdq.Poisson(0.8),
        service=service,
        control=qdq.PowerOfD(3),
        treatment=qdq.LeastWorkLeft(),
    )
    exact = central_queue(10, 8.0, isinstance(service, qdq.Deterministic))
    ours = mean_of(scenario, qdq_runs(scenario, 1.0, QDQ_REPLICATIONS, 4), 1)
    assert_same(ours, exactly(exact), exact)
    truth = qdq.true_effect(scenario, relative_error=0.02, seed=7, n_jobs=2)
    simulated = truth.mean_response_treatment, truth.standard_error_treatment
    assert_same(Mean(*simulated, truth.n_replications - 3), exactly(exact), exact)


def cyclic_responses(arrivals: qdq.Periodic, share: float) -> tuple[float, float]:
    """Mean response of two servers by arm: random routing, and for a share the shorter queue.

    By Kolmogorov's equations for the law of the two queue lengths over cycle after cycle. A task
    that joins a queue of k responds in (k + 1) mean services.
    """
    size = 50
    a, b = np.divmod(np.arange(size * size), size)
    shorter = np.where(a == b, 0.5, a < b)  # probability that it is the first

    def generator(allowed: np.ndarray, step: int, rate: np.ndarray) -> csr_array:
        start = np.flatnonzero(allowed & (rate > 0.0))
        rates = np.concatenate((rate[start], -rate[start]))
        places = np.concatenate((start + step, start)), np.concatenate((start, start))
        return csr_array((rates, places), shape=(size * size, size * size))

    first = 0.5 * (1.0 - share) + share * shorter
    up = generator(a < size - 1, size, first) + generator(b < size - 1, 1, 1.0 - first)
    ones = np.ones(size * size)
    down = generator(a > 0, -size, ones) + generator(b > 0, -1, ones)
    costs = np.array([1.0 + (a + b) / 2.0, 1.0 + np.minimum(a, b)])

    def slope(time: float, state: np.ndarray) -> np.ndarray:
        law = state[:-2]
        rate = 2.0 * float(arrivals.rate_at(np.array(time)))
        return np.concatenate((rate * (up @ law) + down @ law, rate * (costs @ law)))

    law = np.zeros(size * size)
    law[0] = 1.0
    before, now = np.zeros(2), np.ones(2)
    while np.abs(now - before).max() > 1e-7:
        state = np.concatenate((law, np.zeros(2)))
        cycle = solve_ivp(slope, (0.0, arrivals.period), state, rtol=1e-8, atol=1e-11)
        law = cycle.y[:-2, -1]
        before, now = now, cycle.y[-2:, -1] / (2.0 * arrivals.rate * arrivals.period)
    assert law[(a == size - 1) | (b == size - 1)].sum() < 1e-9
    return float(now[0]), float(now[1])


def test_periodic_arrivals_at_two_servers_against_kolmogorovs_equations():
    arrivals = qdq.Periodic(0.5, 0.8, 20.0)
    scenario = qdq.Scenario(
        n_servers=2, arrivals=arrivals, control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2)
    )
    exact = {share: cyclic_responses(arrivals, share) for share in SHARES.values()}
    for seed, share in enumerate(exact):
        runs = qdq_runs(scenario, share, QDQ_REPLICATIONS, 5 + seed)
        for arm in (0, 1):
            if np.isfinite(runs[:, arm]).all():
                known = exact[share][arm]
                assert_same(mean_of(scenario, runs, arm), exactly(known), known)
    truth = qdq.true_effect(scenario, relative_error=0.02, seed=7, n_jobs=2)
    effect = exact[1.0][1] - exact[0.0][0]
    assert_same(effect_of(truth), exactly(effect), abs(effect))
    # A constant rate, or the mean over time in place of tasks, would be far off.
    assert exact[0.0][0] > 1.15 * 2.0
