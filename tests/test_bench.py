"""The measurements of speed and memory: at tiny sizes, and the table that the book shows."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

import bench
import qdq

TINY = bench.Sizes(
    repetitions=1,
    n_tasks=2_000,
    replications=2,
    simpy_tasks=500,
    ciw_tasks=300,
    checked_tasks=1_000,
    large_n_servers=(50,),
    streamed=(2_000, 4_000),
    in_memory=(2_000,),
    n_servers=(2, 50),
    horizon=(10, 100),
    horizons=(1, 2),
)
CONSTANT = ["date", "machine", "python", "numpy", "numba", "qdq", "simpy", "ciw"]
PLANNED = [name for name in bench.COLUMNS if name not in (*CONSTANT, "median", "minimum")]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no start but that of the package, and compile no policy."""
    monkeypatch.setattr(bench, "users_policy", lambda: qdq.PowerOfD(2))
    monkeypatch.setattr(bench, "in_fresh_process", bench.probe)
    monkeypatch.setattr(bench, "SMALL_STUDY", "pass")


def planned(sizes: bench.Sizes) -> pd.DataFrame:
    """Return all of the table but what is found."""
    rows = []
    for group in bench.groups(sizes, ""):
        for case in group:
            row = {name: getattr(case, name, None) for name in PLANNED}
            row["repetitions"] = case.repetitions or sizes.repetitions
            units = ["s"] if case.table == "start" else ["ns per task"]
            units += ["bytes"] if case.table.startswith("growth") else []
            rows += [row | {"unit": unit} for unit in units]
    return pd.DataFrame(rows)


def check_table(path: Path, sizes: bench.Sizes) -> None:
    """Check that a table holds all that is measured at these sizes, and makes sense."""
    frame = pd.read_csv(path)
    assert tuple(frame.columns) == bench.COLUMNS
    assert_frame_equal(frame[PLANNED], planned(sizes), check_dtype=False)
    assert (frame["minimum"] > 0).all()
    assert (frame["median"] >= frame["minimum"]).all()
    assert len(frame[CONSTANT].drop_duplicates()) == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", frame["date"][0])
    assert re.fullmatch(r"[^/]+, \d+ cores?, \d+ GiB", frame["machine"][0])
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", path.read_text("utf-8"))


@pytest.mark.usefixtures("in_this_process")
def test_a_run_writes_every_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("simpy", "ciw"):
        pytest.importorskip(name)
    monkeypatch.setattr(bench, "QUICK", TINY)
    path = tmp_path / "results" / "bench.csv"
    assert bench.main(["--quick", "--output", str(path)]) == 0
    check_table(path, TINY)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("in_this_process")
def test_the_table_in_the_book_is_of_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "disagreement", lambda *_: np.zeros(2))
    check_table(bench.RESULTS, bench.Sizes())


def test_cases_take_turns() -> None:
    order = []

    def case(name: str, **given: object) -> bench.Case:
        def measure(seed: int) -> dict[str, float]:
            order.append((name, seed))
            return {"s": float(seed)}

        return bench.Case("table", name, measure, **given)

    group = [case("a"), case("b", fresh=True), case("c", repetitions=1)]
    with bench.tqdm(disable=True) as bar:
        rows = list(bench.measured(group, 3, bar))
    first_runs = [("a", 0), ("c", 0)]
    rounds = [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]
    assert order == first_runs + rounds
    found = [(row["what"], row["median"], row["minimum"], row["repetitions"]) for row in rows]
    assert found[0] == ("a", "2.000", "1.000", 3)
    assert found[1:] == [("b", "2.000", "1.000", 3), ("c", "1.000", "1.000", 1)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system itself keeps them apart")
def test_peak_memory_is_of_the_process_itself_and_not_of_what_started_it() -> None:
    size = 400_000_000
    large = np.ones(size // 8)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        child = pool.submit(bench.peak_memory).result()
    assert bench.peak_memory() > large.nbytes
    assert 20_000_000 < child < size


def other_arm(scenario: qdq.Scenario, n_tasks: int, seed: int) -> bench.Tasks:
    return bench.qdq_model(scenario.replace(treatment=scenario.control), n_tasks, seed)


def other_load(scenario: qdq.Scenario, n_tasks: int, seed: int) -> bench.Tasks:
    return bench.qdq_model(scenario.replace(arrivals=qdq.Poisson(0.7)), n_tasks, seed)


@pytest.mark.parametrize(
    ("model", "same"), [(bench.qdq_model, True), (other_arm, False), (other_load, False)]
)
def test_a_model_of_another_system_is_told(
    model: Callable[[qdq.Scenario, int, int], bench.Tasks], same: bool
) -> None:
    far = np.abs(bench.disagreement(model, bench.Sizes().checked_tasks))
    assert (far.max() < 4.5) == same


@pytest.mark.long
@pytest.mark.parametrize("tool", ["simpy", "ciw"])
def test_other_simulators_simulate_the_same_system(tool: str) -> None:
    pytest.importorskip(tool)
    model = {"simpy": bench.simpy_model, "ciw": bench.ciw_model}[tool]
    assert np.abs(bench.disagreement(model, bench.Sizes().checked_tasks)).max() < 4.5
    tasks = model(bench.system(), 2_000, 1)
    assert len(tasks.arrival) == len(tasks.departure) == len(tasks.treated) == 2_000
    assert (np.diff(tasks.arrival) >= 0).all()
    assert (tasks.departure > tasks.arrival).all()
