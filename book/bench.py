"""Measure how fast qdq is and how much memory it takes: python book/bench.py --help.

Every time is the median, and the minimum, of several runs of the same work with different seeds, by
the wall clock. What belongs to one table takes turns (all of it once, then all of it once more), so
that a slow minute of the machine is shared; compilation and a first run come before. The order of
the tables is that of `groups`. Growth and start are measured in fresh processes.

Two general simulators are measured beside qdq, with models of the same system, which must agree
with it in the mean response and its difference between the arms before they are timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from tqdm import tqdm

import qdq

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "book" / "results" / "bench.csv"
LOAD = 0.8
FAIR_COIN = qdq.Bernoulli(0.5)
HORIZON = 480  # arrivals, where it is not what varies

DIGITS = {"ns per task": 1, "bytes": 0, "s": 3}
"""The units of what is measured, and the digits that are written of each after the point."""

COLUMNS = (
    *("table", "what", "tool", "n_servers", "n_tasks", "horizon", "horizons", "threads"),
    *("unit", "median", "minimum", "repetitions", "date", "machine", "python"),
    *("numpy", "numba", "qdq", "simpy", "ciw"),
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    repetitions: int = 5
    n_tasks: int = 1_000_000  # tasks of what does not vary with them
    replications: int = 16  # of a study
    simpy_tasks: int = 20_000
    ciw_tasks: int = 5_000
    checked_tasks: int = 20_000  # of the runs that must agree
    large_n_servers: tuple[int, ...] = (1_000, 10_000)  # of `features`
    # Of `growth`.
    streamed: tuple[int, ...] = tuple(10**k for k in range(4, 10))
    in_memory: tuple[int, ...] = tuple(10**k for k in range(4, 8))
    n_servers: tuple[int, ...] = (2, 10, 100, 1_000, 10_000, 100_000)
    horizon: tuple[int, ...] = tuple(10**k for k in range(1, 6))
    horizons: tuple[int, ...] = (1, 2, 4, 8, 16, 32)


QUICK = Sizes(
    repetitions=1,
    replications=4,
    simpy_tasks=4_000,
    ciw_tasks=1_000,
    checked_tasks=5_000,
    streamed=(10_000, 1_000_000),
    in_memory=(10_000, 1_000_000),
    n_servers=(2, 100, 10_000),
    horizon=(10, 10_000),
    horizons=(1, 8),
)


@dataclass(frozen=True)
class Case:
    """One thing to measure. `measure` takes a seed and returns a number a unit."""

    table: str
    what: str
    measure: Callable[[int], dict[str, float]]
    tool: str = "qdq"
    n_servers: int | None = None
    n_tasks: int | None = None
    horizon: int | None = None  # the longest one
    horizons: int | None = None  # how many
    threads: int | None = None
    fresh: bool = False  # in a process of its own, so that no run before the first is needed
    repetitions: int | None = None  # if they are not those of the others
    seconds: float = 0.1  # that it takes roughly, for the progress bar

    @property
    def weight(self) -> int:
        """What one measurement adds to the progress bar."""
        return max(1, round(10 * self.seconds))


# --------------------------------------------------------------------------------------------------
# What is measured
# --------------------------------------------------------------------------------------------------


def system(n_servers: int = 20, **changes: Any) -> qdq.Scenario:
    """Return the system of all measurements, power of 2 against 3 choices, with changes."""
    return qdq.Scenario(n_servers=n_servers, **({"arrivals": qdq.Poisson(LOAD)} | changes))


def simulated_tasks(scenario: qdq.Scenario, n_tasks: int, warm_up: float) -> float:
    """Return the tasks of a log and the expected number of those before it."""
    return n_tasks + scenario.total_arrival_rate * warm_up


def per_task(run: Callable[[int], object], tasks: float) -> Callable[[int], dict[str, float]]:
    """Return what measures the time of `run(seed)` a task."""

    def measure(seed: int) -> dict[str, float]:
        start = perf_counter()
        run(seed)
        return {"ns per task": 1e9 * (perf_counter() - start) / tasks}

    return measure


def shorter_of_two(
    queue_lengths: NDArray[np.int64],
    work: NDArray[np.float64],
    rates: NDArray[np.float64],
    candidates: NDArray[np.int64],
    u: float,
) -> int:
    """Choose as power of 2 does: a user's policy."""
    first, second = candidates[0], candidates[1]
    return int(second if queue_lengths[second] < queue_lengths[first] else first)


def users_policy() -> qdq.UserPolicy:
    """Return power of 2 as a policy of the user's own."""
    from numba import njit

    choose: Any = njit(shorter_of_two)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # its stability is that of power of 2
        return qdq.UserPolicy(choose)


def features(sizes: Sizes) -> Iterator[Case]:
    """Time `simulate` with nothing switched on, and with each feature alone."""
    plain = "2 against 3 choices"
    changes: dict[str, dict[str, Any]] = {
        "unequal rates": {"service_rates": [0.5, 1.5] * 10},
        "periodic arrivals": {"arrivals": qdq.Periodic(LOAD, 0.2, 100.0)},
        "deterministic service": {"service": qdq.Deterministic()},
        "Pareto service": {"service": qdq.Pareto(2.5)},
    }
    for delay in (0.5, 1.0, 5.0):
        late = {"information_delay": delay}
        changes[f"delay {delay:g}"] = late
        changes[f"delay {delay:g}, own counted"] = late | {"counts_own_dispatches": True}
    changes |= {
        "1 against 2 choices": {"control": qdq.PowerOfD(1), "treatment": qdq.PowerOfD(2)},
        "2 against 5 choices": {"treatment": qdq.PowerOfD(5)},
        "shortest expected delay": {"treatment": qdq.ShortestExpectedDelay(2)},
        "shortest queue": {"treatment": qdq.JoinShortestQueue()},
        "idle queue": {"treatment": qdq.JoinIdleQueue()},
        "least work left": {"treatment": qdq.LeastWorkLeft()},
        "round robin": {"treatment": qdq.RoundRobin()},
        "a user's policy": {"treatment": users_policy()},
    }
    settings: list[tuple[str, qdq.Scenario, Any]] = [
        *((plain, system(n), FAIR_COIN) for n in (20, *sizes.large_n_servers)),
        *((what, system(**changed), FAIR_COIN) for what, changed in changes.items()),
        ("switchback", system(), qdq.Switchback(100.0)),
        ("server split", system(), qdq.ServerSplit()),
    ]
    for what, scenario, design in settings:

        def run(seed: int, scenario: qdq.Scenario = scenario, design: Any = design) -> object:
            return qdq.simulate(scenario, design, sizes.n_tasks, seed, warm_up=0.0)

        yield Case(
            *("features", what, per_task(run, sizes.n_tasks)),
            n_servers=scenario.n_servers,
            n_tasks=sizes.n_tasks,
            threads=1,
        )


def steps(sizes: Sizes) -> Iterator[Case]:
    """Time what comes after `simulate`: estimates, in one pass too, and many replications."""
    scenario, n = system(), sizes.n_tasks
    tasks = simulated_tasks(scenario, n, scenario.default_warm_up)

    def simulate(seed: int) -> qdq.TaskLog:
        return qdq.simulate(scenario, FAIR_COIN, n, seed)

    def study(threads: int) -> Callable[[int], object]:
        return lambda seed: qdq.run_study(
            scenario, n, sizes.replications, seed, threads, truth=0.0, progress=False
        )

    whole_study = tasks * sizes.replications
    runs: list[tuple[str, Callable[[int], object], int, float]] = [
        ("simulate", simulate, 1, tasks),
        ("simulate, then estimate", lambda seed: qdq.estimate(simulate(seed)), 1, tasks),
        ("replicate", lambda seed: qdq.replicate(scenario, FAIR_COIN, n, seed), 1, tasks),
        ("run_study", study(1), 1, whole_study),
        ("run_study", study(2), 2, whole_study),
    ]
    for what, run, threads, simulated in runs:
        yield Case(
            *("steps", what, per_task(run, simulated)),
            n_servers=scenario.n_servers,
            n_tasks=n,
            horizon=None if what == "simulate" else scenario.default_horizon,
            horizons=None if what == "simulate" else 1,
            threads=threads,
            seconds=5e-8 * simulated,
        )


# --------------------------------------------------------------------------------------------------
# The same system in SimPy and in Ciw
# --------------------------------------------------------------------------------------------------


class Tasks(NamedTuple):
    """The tasks of a run in order of arrival."""

    arrival: NDArray[np.float64]
    departure: NDArray[np.float64]
    treated: NDArray[np.bool_]


def simpy_model(scenario: qdq.Scenario, n_tasks: int, seed: int) -> Tasks:
    """Simulate power of 2 against 3 by a process a server, the faster of two usual ways."""
    import simpy

    rng = random.Random(seed)
    environment = simpy.Environment()
    queues = [simpy.Store(environment) for _ in range(scenario.n_servers)]
    in_system = [0] * scenario.n_servers
    arrival, departure = [0.0] * n_tasks, [0.0] * n_tasks
    treated = [False] * n_tasks

    def server(s: int) -> Generator[Any, Any, None]:
        while True:
            task = yield queues[s].get()
            yield environment.timeout(rng.expovariate(1.0))
            departure[task] = environment.now
            in_system[s] -= 1

    def dispatcher() -> Generator[Any, Any, None]:
        for task in range(n_tasks):
            yield environment.timeout(rng.expovariate(scenario.total_arrival_rate))
            treated[task] = rng.random() < 0.5
            candidates = rng.sample(range(scenario.n_servers), 3 if treated[task] else 2)
            chosen = min(candidates, key=in_system.__getitem__)  # of equals the first in the sample
            in_system[chosen] += 1
            arrival[task] = environment.now
            queues[chosen].put(task)

    for s in range(scenario.n_servers):
        environment.process(server(s))
    environment.process(dispatcher())
    environment.run()
    return Tasks(np.array(arrival), np.array(departure), np.array(treated))


def ciw_model(scenario: qdq.Scenario, n_tasks: int, seed: int) -> Tasks:
    """Simulate power of 2 against 3: two classes of customers, whose arrivals choose a node.

    The run ends when `n_tasks` have left, and so may miss some of the last to arrive. That the
    arrivals choose saves a node that would only dispatch, and so makes for the faster of two usual
    ways.
    """
    import ciw

    class Dispatcher(ciw.ArrivalNode):  # type: ignore[misc]  # Ciw has no types
        def send_individual(self, node: Any, individual: Any) -> None:
            d = 3 if individual.customer_class == "treatment" else 2
            candidates = random.sample(self.simulation.transitive_nodes, d)
            chosen = min(candidates, key=lambda node: node.number_of_individuals)
            super().send_individual(chosen, individual)

    n, arms = scenario.n_servers, ("control", "treatment")
    arrivals = [ciw.dists.Exponential(scenario.total_arrival_rate / 2), *[None] * (n - 1)]
    leave = ciw.routing.NetworkRouting([ciw.routing.Leave() for _ in range(n)])
    network = ciw.create_network(
        arrival_distributions=dict.fromkeys(arms, arrivals),
        service_distributions=dict.fromkeys(arms, [ciw.dists.Exponential(1.0)] * n),
        number_of_servers=[1] * n,
        routing=dict.fromkeys(arms, leave),
    )
    ciw.seed(seed)
    simulation = ciw.Simulation(network, arrival_node_class=Dispatcher)
    simulation.simulate_until_max_customers(n_tasks)
    records = sorted(simulation.get_all_records(), key=lambda record: record.arrival_date)
    return Tasks(
        np.array([record.arrival_date for record in records]),
        np.array([record.exit_date for record in records]),
        np.array([record.customer_class == "treatment" for record in records]),
    )


def qdq_model(scenario: qdq.Scenario, n_tasks: int, seed: int) -> Tasks:
    """Simulate the same, from an empty system too."""
    log = qdq.simulate(scenario, FAIR_COIN, n_tasks, seed, warm_up=0.0)
    return Tasks(log.arrival, log.departure, log.treated)


def mean_responses(tasks: Tasks, count: int) -> list[float]:
    """Return mean response and difference of the arms' means over the first `count` tasks."""
    response, treated = (tasks.departure - tasks.arrival)[:count], tasks.treated[:count]
    return [response.mean(), response[treated].mean() - response[~treated].mean()]


def disagreement(
    model: Callable[[qdq.Scenario, int, int], Tasks], n_tasks: int, replications: int = 200
) -> NDArray[np.float64]:
    """Return how far `mean_responses` of one run are from those of qdq, in standard errors.

    Both start empty and so have the same expectation. The standard errors are from replications of
    qdq. The last tenth of the tasks is left out: some of the last ones may still have been there.
    """
    scenario, count = system(), n_tasks - n_tasks // 10
    expected = np.array(
        [mean_responses(qdq_model(scenario, n_tasks, seed), count) for seed in range(replications)]
    )
    found = np.array(mean_responses(model(scenario, n_tasks, 1), count))
    error = expected.std(axis=0, ddof=1) * math.sqrt(1.0 + 1.0 / replications)
    return np.asarray((found - expected.mean(axis=0)) / error)


def tools(sizes: Sizes) -> Iterator[Case]:
    """Time the same system in three simulators.

    Raises
    ------
    RuntimeError
        If it is not the same.
    """
    models = {
        "qdq": (qdq_model, sizes.n_tasks),
        "SimPy": (simpy_model, sizes.simpy_tasks),
        "Ciw": (ciw_model, sizes.ciw_tasks),
    }
    for tool, (model, n_tasks) in models.items():
        if tool != "qdq":
            far = disagreement(model, sizes.checked_tasks)
            if np.abs(far).max() > 4.5:
                raise RuntimeError(
                    f"the model in {tool} is of another system: mean response and effect are {far} "
                    "standard errors from those in qdq"
                )

        def run(seed: int, model: Any = model, n_tasks: int = n_tasks) -> object:
            return model(system(), n_tasks, seed)

        yield Case(
            *("tools", "arrival, departure and arm of every task", per_task(run, n_tasks), tool),
            n_servers=20,
            n_tasks=n_tasks,
            threads=1,
            seconds=0.1 if tool == "qdq" else 1.0,
        )


# --------------------------------------------------------------------------------------------------
# Growth and start, in fresh processes
# --------------------------------------------------------------------------------------------------


def peak_memory() -> int:
    """Return the most memory that this process has had, in bytes."""
    try:  # what `getrusage` says includes, on Linux, the peak of the process that started this one
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def probe(
    keeps_log: bool, scenario: qdq.Scenario, n_tasks: int, horizons: list[int], seed: int
) -> dict[str, float]:
    """Measure one run of `simulate` or `replicate`, and the most memory of this process so far."""

    def run(n: int) -> None:
        if keeps_log:
            qdq.simulate(scenario, FAIR_COIN, n, seed)
        else:
            qdq.replicate(scenario, FAIR_COIN, n, seed, horizon=horizons)

    run(min(n_tasks, max(100_000, 2 * max(horizons))))  # loads the kernels
    tasks = simulated_tasks(scenario, n_tasks, scenario.default_warm_up)
    return per_task(lambda _: run(n_tasks), tasks)(seed) | {"bytes": peak_memory()}


def in_fresh_process(*arguments: Any) -> dict[str, float]:
    """Return what `probe` does in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(probe, *arguments).result()


def growth(sizes: Sizes) -> Iterator[Case]:
    """Measure time and memory against each size, in four tables."""

    def case(
        against: str, what: str, n_tasks: int, n_servers: int = 20, horizons: Any = (HORIZON,)
    ) -> Case:
        # Two servers leave no third choice.
        fewer = {"control": qdq.PowerOfD(1), "treatment": qdq.PowerOfD(2)} if n_servers < 3 else {}
        scenario = system(n_servers, **fewer)

        def measure(seed: int) -> dict[str, float]:
            return in_fresh_process(what == "simulate", scenario, n_tasks, list(horizons), seed)

        simulated = simulated_tasks(scenario, n_tasks, scenario.default_warm_up)
        replicates = what == "replicate"
        return Case(
            *(f"growth with {against}", what, measure),
            n_servers=n_servers,
            n_tasks=n_tasks,
            horizon=max(horizons) if replicates else None,
            horizons=len(horizons) if replicates else None,
            threads=1,
            fresh=True,
            repetitions=1 if n_tasks >= 10**9 else None,  # more than a minute
            seconds=3.0 + 8e-8 * simulated,
        )

    for n_tasks in sizes.in_memory:
        yield case("n", "simulate", n_tasks)
    for n_tasks in sizes.streamed:
        yield case("n", "replicate", n_tasks)
    for what in ("simulate", "replicate"):
        for n_servers in sizes.n_servers:
            yield case("N", what, sizes.n_tasks, n_servers)
    for horizon in sizes.horizon:
        yield case("L", "replicate", sizes.n_tasks, horizons=(horizon,))
    for count in sizes.horizons:
        # Of nearly the same length, so that it is their number that varies.
        horizons = range(HORIZON, HORIZON + count)
        yield case("horizons", "replicate", sizes.n_tasks, horizons=horizons)


SMALL_STUDY = """
import qdq
scenario = qdq.Scenario(n_servers=2, arrivals=qdq.Poisson(0.6),
                        control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2))
print(qdq.run_study(scenario, n_tasks=2000, n_replications=20, seed=3).table)
"""


def seconds_of_python(code: str, cache: str) -> dict[str, float]:
    """Run code in a new Python, and return the time from its start to its end."""
    start = perf_counter()
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_CACHE_DIR": cache},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return {"s": perf_counter() - start}


def starts(cache: str) -> Iterator[Case]:
    """Measure from the start of Python to its end; `cache` is a folder for compiled kernels."""

    def importing(_: int) -> dict[str, float]:
        return seconds_of_python("import qdq", cache)

    def compiling(_: int) -> dict[str, float]:
        shutil.rmtree(cache, ignore_errors=True)
        return seconds_of_python(SMALL_STUDY, cache)

    def compiled(_: int) -> dict[str, float]:
        return seconds_of_python(SMALL_STUDY, cache)

    small: dict[str, Any] = {"n_servers": 2, "n_tasks": 2000, "fresh": True}
    yield Case("start", "import qdq", importing, seconds=1.0)
    yield Case("start", "small study, to be compiled", compiling, **small, seconds=20.0)
    # In the next turn, and so with the kernels of the last one.
    yield Case("start", "small study, compiled", compiled, **small, seconds=3.0)


# --------------------------------------------------------------------------------------------------
# Running
# --------------------------------------------------------------------------------------------------


def machine() -> str:
    """Return processor, cores and memory, and nothing that tells this machine from its like."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            model = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{' '.join(model.split())}, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB"


def measured(group: list[Case], repetitions: int, bar: Any) -> Iterator[dict[str, Any]]:
    """Measure cases in turns, and yield a row for each and unit."""
    samples: list[list[dict[str, float]]] = [[] for _ in group]
    for round_ in range(-1, repetitions):
        for case, sample in zip(group, samples, strict=True):
            bar.set_postfix_str(f"{case.table}: {case.what}", refresh=case.seconds >= 1.0)
            if round_ >= 0:
                if len(sample) < (case.repetitions or repetitions):
                    sample.append(case.measure(round_ + 1))
                    bar.update(case.weight)
            elif not case.fresh:
                case.measure(0)  # compiles, and brings everything into the caches
                bar.update(case.weight)
    for case, sample in zip(group, samples, strict=True):
        given = {name: getattr(case, name) for name in COLUMNS if hasattr(case, name)}
        for unit in sample[0]:
            values = [found[unit] for found in sample]
            median, minimum = (
                f"{value:.{DIGITS[unit]}f}" for value in (statistics.median(values), min(values))
            )
            row = {"unit": unit, "median": median, "minimum": minimum}
            yield given | row | {"repetitions": len(values)}


def groups(sizes: Sizes, cache: str) -> Iterator[list[Case]]:
    """Yield what takes turns: the tables in order, first those that are over soon."""
    yield list(features(sizes))
    yield list(steps(sizes))
    yield list(tools(sizes))
    yield list(starts(cache))
    yield list(growth(sizes))


def bench(sizes: Sizes) -> pd.DataFrame:
    """Measure everything; return a row for each measurement."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        todo = list(groups(sizes, os.path.join(folder, "kernels")))
        total = sum(
            case.weight * ((case.repetitions or sizes.repetitions) + (not case.fresh))
            for group in todo
            for case in group
        )
        shown = "{percentage:3.0f}%|{bar}| {elapsed}, {remaining} to go{postfix}"
        with tqdm(total=total, bar_format=shown) as bar:
            for group in todo:
                rows += measured(group, sizes.repetitions, bar)
    constant = {"date": date.today().isoformat(), "machine": machine()}
    constant |= {"python": platform.python_version(), "qdq": qdq.__version__}
    constant |= {name: metadata.version(name) for name in ("numpy", "numba", "simpy", "ciw")}
    frame = pd.DataFrame([row | constant for row in rows], columns=list(COLUMNS))
    whole = ["n_servers", "n_tasks", "horizon", "horizons", "threads"]
    return frame.astype(dict.fromkeys(whole, "Int64"))


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(
        prog="python book/bench.py",
        description="Measure speed and memory, for the page of the book that shows them. Nothing "
        "else should run on the machine meanwhile.",
    )
    parser.add_argument("--quick", action="store_true", help="a minute: fewer sizes, each once")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="CSV")
    options = parser.parse_args(arguments)
    if missing := [name for name in ("simpy", "ciw") if importlib.util.find_spec(name) is None]:
        parser.error(f"install {' and '.join(missing)} to measure beside")
    frame = bench(QUICK if options.quick else Sizes())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    part = options.output.with_name(f"{options.output.name}.part")
    frame.to_csv(part, index=False)
    os.replace(part, options.output)
    print(f"{len(frame)} measurements are in {options.output.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
