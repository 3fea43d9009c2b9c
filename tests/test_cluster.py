"""Studies on a Dask cluster of two processes: the same numbers, whatever happens to workers."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import joblib
import numpy as np
import pandas as pd
import pytest
from distributed import Client, KilledWorker, LocalCluster, get_task_stream

import qdq
from qdq import study as module
from qdq.study import Study, run_study

STUDY = {
    "scenario": qdq.Scenario(
        n_servers=4, arrivals=qdq.Poisson(0.6), control=qdq.PowerOfD(1), treatment=qdq.PowerOfD(2)
    ),
    "n_tasks": 2000,
    "n_replications": 24,  # the last chunk of the store is not full
    "seed": 3,
    "designs": (qdq.Bernoulli(0.5), qdq.Switchback(10.0), qdq.ServerSplit(0.5)),
    "horizon": 10,
    "truth": -0.9,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    # By default a cluster forgets a worker that needs more than 15 s to start again.
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "120s"}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # any free port
            local_directory=str(tmp_path_factory.mktemp("workers")),
        ) as cluster,
    ):
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        yield client


def on_cluster(**changes: object) -> Study:
    with joblib.parallel_config("dask"):
        return run_study(**STUDY | changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, dict[str, bytes]]:
    """Return replications and store of the study without a cluster."""
    store = tmp_path_factory.mktemp("alone")
    replications = run_study(**STUDY, n_jobs=1, store=store).replications
    return replications, files(store)


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_same(found: Study, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(found.replications, expected, check_exact=True)


def at_first_chunk(monkeypatch: pytest.MonkeyPatch, act) -> None:
    """Call `act` as soon as the first replications are in the store, and others are under way."""
    save_chunk = module._Store.save_chunk
    remaining = [act]

    def save_and_act(self: module._Store, first: int, replications: list) -> None:
        save_chunk(self, first, replications)
        if remaining:
            remaining.pop()()

    monkeypatch.setattr(module._Store, "save_chunk", save_and_act)


def test_numbers_and_store_are_those_without_a_cluster(client, alone, tmp_path):
    with get_task_stream(client) as stream:
        found = on_cluster(store=tmp_path)
    assert_same(found, alone[0])
    assert files(tmp_path) == alone[1]
    replications = [task["worker"] for task in stream.data if task["key"].startswith("_replicate")]
    assert len(replications) == STUDY["n_replications"]
    assert len(set(replications)) == 2  # both have worked


@pytest.mark.parametrize("first", ["cluster", "alone"])
def test_a_study_goes_on_with_or_without_the_cluster(client, alone, tmp_path, monkeypatch, first):
    begin, go_on = on_cluster, lambda **changes: run_study(**STUDY | changes)
    if first == "alone":
        begin, go_on = go_on, begin
    begin(n_replications=13, store=tmp_path)
    with get_task_stream(client) as stream:
        found = go_on(store=tmp_path)
    assert_same(found, alone[0])
    assert files(tmp_path) == alone[1]
    ran = sum(task["key"].startswith("_replicate") for task in stream.data)
    assert ran == (0 if first == "cluster" else STUDY["n_replications"] - 13)


def test_a_task_is_small_and_a_long_trace_is_sent_once(cluster, client, tmp_path, monkeypatch):
    n_tasks = 20_000
    rng = np.random.default_rng(1)
    scenario = STUDY["scenario"].replace(
        arrivals=qdq.ArrivalTrace(np.cumsum(rng.exponential(1 / 2.4, n_tasks))),
        service=qdq.ServiceTrace(rng.exponential(1.0, n_tasks)),
    )
    sizes: dict[str, list[int]] = {"_replicate": [], "_same": []}

    def look():
        for key, task in cluster.scheduler.tasks.items():
            sizes[key.split("-")[0]].append(len(pickle.dumps(task.run_spec)))

    at_first_chunk(monkeypatch, look)
    # Dask's own warning of it must not come through.
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "100 kB"}):
        found = on_cluster(
            scenario=scenario, designs=qdq.Bernoulli(), n_tasks=n_tasks, store=tmp_path
        )
    assert len(sizes["_replicate"]) == STUDY["n_replications"]
    assert max(sizes["_replicate"]) < 1000
    (whole,) = sizes["_same"]
    assert whole > 2 * 8 * n_tasks
    assert_same(
        found,
        run_study(
            **STUDY | {"scenario": scenario, "designs": qdq.Bernoulli(), "n_tasks": n_tasks}
        ).replications,
    )


def test_an_ordinary_plan_is_small(client, monkeypatch):
    plans = []
    submit = Client.submit

    def submit_and_look(self, function, plan, **options):
        plans.append(len(pickle.dumps(plan)))
        return submit(self, function, plan, **options)

    monkeypatch.setattr(Client, "submit", submit_and_look)
    on_cluster(n_replications=2)
    assert len(plans) == 1
    assert plans[0] < 2000


def test_workers_with_another_source_are_refused(client):
    def pretend(source):
        qdq.provenance._SOURCE_HASH = source

    client.run(pretend, "0" * 64)
    try:
        with pytest.raises(RuntimeError, match=r"a worker has another source of qdq \(0{64}\)"):
            on_cluster()
    finally:
        client.run(pretend, qdq.provenance.source_hash())


def test_workers_without_the_package_are_refused(client):
    def hide():
        sys.modules["qdq.provenance"] = None

    def show():
        sys.modules["qdq.provenance"] = sys.modules["qdq"].provenance

    client.run(hide)
    try:
        with pytest.raises(Exception, match=r"ModuleNotFoundError.*qdq"):
            on_cluster()
    finally:
        client.run(show)


def test_an_error_names_its_replication(client):
    def fail(time):
        raise OSError("no rate")

    with pytest.raises(OSError, match="no rate") as caught:
        on_cluster(arrival_rate=fail)
    assert "replication 0 of the study, seed=(3, 0)" in caught.value.__notes__[0]


def test_a_killed_worker_costs_nothing_but_time(client, tmp_path, monkeypatch):
    longer = {"n_tasks": 100_000, "n_replications": 30}
    pids = client.run(os.getpid)
    victim = next(iter(pids))

    def kill():
        assert client.processing()[victim]
        os.kill(pids[victim], signal.SIGKILL)

    at_first_chunk(monkeypatch, kill)
    found = on_cluster(**longer, store=tmp_path / "killed")
    assert victim not in client.scheduler_info()["workers"]
    monkeypatch.undo()
    expected = run_study(**STUDY | longer, store=tmp_path / "alone").replications
    assert_same(found, expected)
    assert files(tmp_path / "killed") == files(tmp_path / "alone")


def test_a_replication_that_kills_every_worker_ends_the_study(cluster, client, monkeypatch):
    # Four deaths by default.
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 0)

    def kill(time):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(KilledWorker):
        on_cluster(arrival_rate=kill)
