"""The measurements of speed and memory: at tiny sizes, and the table that the book shows."""

from __future__ import annotations

import re
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bench
import qdq

TINY = bench.Sizes(
    repetitions=2,
    n_tasks=2_000,
    replications=2,
    simpy_tasks=500,
    ciw_tasks=300,
    large_n_servers=(50,),
    streamed=(2_000, 4_000),
    in_memory=(2_000,),
    n_servers=(2, 50),
    horizon=(10, 100),
    horizons=(1, 2),
)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no other Python for the kernels, and compile no policy."""
    monkeypatch.setattr(bench, "users_policy", lambda: qdq.PowerOfD(2))
    monkeypatch.setattr(bench, "in_fresh_process", bench.probe)
    monkeypatch.setattr(bench, "SMALL_STUDY", "import qdq")


def what_is_measured(sizes: bench.Sizes) -> list[tuple[object, ...]]:
    rows = []
    for group in bench.groups(sizes, ""):
        for case in group:
            units = ["s"] if case.table == "start" else ["ns per task"]
            units += ["bytes"] if case.table.startswith("growth") else []
            rows += [
                (case.table, case.what, case.tool, case.n_servers, case.n_tasks, case.horizon)
                + (case.horizons, case.threads, unit, case.repetitions or sizes.repetitions)
                for unit in units
            ]
    return rows


def check_table(path: Path, sizes: bench.Sizes) -> None:
    """Check that a table holds all that is measured at these sizes, and makes sense."""
    text = path.read_text("utf-8")
    frame = pd.read_csv(path)
    assert tuple(frame.columns) == bench.COLUMNS
    shown = frame[list(bench.COLUMNS[:9]) + ["repetitions"]].astype(object)
    found = [tuple(row) for row in shown.where(shown.notna(), None).to_numpy()]
    assert found == what_is_measured(sizes)
    assert (frame["minimum"] > 0).all()
    assert (frame["median"] >= frame["minimum"]).all()
    constant = frame[["date", "machine", "python", "numpy", "numba", "qdq", "simpy", "ciw"]]
    assert len(constant.drop_duplicates()) == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", frame["date"][0])
    assert re.fullmatch(r"[^/]+, \d+ cores?, \d+ GiB", frame["machine"][0])
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert "/" not in text


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

    with bench.tqdm(total=1, disable=True) as bar:
        group = [case("a"), case("b", fresh=True), case("c", repetitions=1)]
        rows = list(bench.measured(group, 3, bar))
    assert order == [
        *[("a", 0), ("c", 0)],
        *[("a", 1), ("b", 1), ("c", 1)],
        *[("a", 2), ("b", 2), ("a", 3), ("b", 3)],
    ]
    assert [(row["median"], row["minimum"], row["repetitions"]) for row in rows] == [
        *[("2.000", "1.000", 3), ("2.000", "1.000", 3), ("1.000", "1.000", 1)]
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process, from its status")
def test_peak_memory_is_of_the_process_itself_and_not_of_what_started_it() -> None:
    size = 400_000_000
    large = np.ones(size // 8)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        child = pool.submit(bench.peak_memory).result()
    assert bench.peak_memory() > large.nbytes
    assert 20_000_000 < child < size


def test_two_servers_choose_between_one_and_two(in_this_process: None) -> None:
    cases = [case for case in bench.growth(TINY) if case.n_servers == 2]
    assert cases
    for case in cases:
        assert set(case.measure(1)) == {"ns per task", "bytes"}


def swapped(scenario: qdq.Scenario, n_tasks: int, seed: int) -> bench.Tasks:
    tasks = bench.qdq_model(scenario, n_tasks, seed)
    return tasks._replace(treated=~tasks.treated)


def test_a_model_of_another_system_is_told() -> None:
    assert np.abs(bench.disagreement(bench.qdq_model, 5_000)).max() < 4.5
    assert np.abs(bench.disagreement(swapped, 5_000)).min() > 4.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("tool", "model"), [("simpy", bench.simpy_model), ("ciw", bench.ciw_model)]
)
def test_other_simulators_simulate_the_same_system(tool: str, model: object) -> None:
    pytest.importorskip(tool)
    assert np.abs(bench.disagreement(model, 20_000)).max() < 4.5
    tasks = model(bench.system(), 2_000, seed=1)
    assert len(tasks.arrival) == len(tasks.departure) == len(tasks.treated) >= 1_900
    assert (np.diff(tasks.arrival) >= 0).all()
    assert (tasks.departure > tasks.arrival).all()
