"""Experiments fed in chunks: the sums are those of the whole log, whatever the chunks."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import qdq

SCENARIO = qdq.Scenario(
    n_servers=4,
    arrivals=qdq.Poisson(0.6),
    service_rates=[0.8, 1.2, 0.8, 1.2],
    control=qdq.PowerOfD(1),
    treatment=qdq.PowerOfD(2),
)
PERIODIC = SCENARIO.replace(arrivals=qdq.Periodic(0.6, 0.5, 30.0), information_delay=0.4)
NUMBERS = ["value", "standard_error", "alpha"]
QUEUES = ["in_system", "including_self", "waiting", "time_average"]


@pytest.fixture
def chunk(monkeypatch):
    """Set the number of tasks to a chunk, and let times move to a new base all the while."""

    def set_chunk(size):
        for name in ("qdq.simulate", "qdq.streaming", "qdq.estimators"):
            monkeypatch.setattr(sys.modules[name], "CHUNK", size)
        monkeypatch.setattr(sys.modules["qdq.simulate"], "_ARRIVALS_TO_A_BASE", 2 * size)

    return set_chunk


def assert_same(one, two, rtol):
    fixed = [name for name in one if name not in (*NUMBERS, "low", "high")]
    pd.testing.assert_frame_equal(one[fixed], two[fixed])
    for name in NUMBERS:
        np.testing.assert_allclose(one[name], two[name], rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("scenario", [SCENARIO, PERIODIC], ids=["poisson", "periodic"])
@pytest.mark.parametrize("size", [1, 7, 100, 5000])
@pytest.mark.parametrize("horizon", [1, 30, 700])
def test_a_bernoulli_experiment_in_chunks(chunk, scenario, size, horizon):
    rates = [None, "window", 2.4, lambda time: 2.0 + np.sin(time)]
    whole = []
    for queue in QUEUES:
        log = qdq.simulate(scenario, qdq.Bernoulli(0.3), 1500, seed=5, record=("service_time",))
        methods = ["dq_response", "dq_queue"] + ["dq_mixed"] * (queue != "waiting")
        for k, rate in enumerate(rates if queue != "time_average" else rates[:1]):
            mine = methods if queue == "in_system" and k == 0 else methods[1:]
            whole.append(qdq.estimate(log, mine, horizon, queue=queue, arrival_rate=rate))
    whole.insert(0, qdq.estimate(log, ["naive"]))
    chunk(size)
    options = {"horizon": horizon, "queue": QUEUES, "arrival_rate": rates}
    streamed = qdq.replicate(scenario, qdq.Bernoulli(0.3), 1500, 5, **options)
    expected = pd.concat(whole, ignore_index=True)
    assert_same(streamed, expected, rtol=1e-9)
    # A log is fed in chunks too.
    again = qdq.estimate(log, ["naive", "dq_mixed"], horizon, queue="time_average")
    assert_same(again, pd.concat([whole[0], whole[-1][-1:]], ignore_index=True), rtol=1e-9)


@pytest.mark.parametrize("size", [1, 50, 5000])
@pytest.mark.parametrize(
    ("design", "washout"),
    [(qdq.Switchback(9.0), 0.0), (qdq.Switchback(9.0), 4.0), (qdq.ServerSplit(0.5), 0.0)],
)
def test_other_designs_in_chunks(chunk, design, washout, size):
    expected = qdq.estimate(qdq.simulate(PERIODIC, design, 1500, seed=6), washout=washout)
    chunk(size)
    streamed = qdq.replicate(PERIODIC, design, 1500, 6, washout=washout)
    assert_same(streamed, expected, rtol=1e-9)


def test_a_skipped_stretch_in_chunks(chunk):
    log = qdq.simulate(SCENARIO, qdq.Bernoulli(0.5), 1500, seed=7)
    skipped = qdq.TaskLog(
        arrival=log.arrival, departure=log.departure, treated=log.treated, skip=200.0
    )
    expected = qdq.estimate(skipped, horizon=40)
    chunk(100)
    assert_same(qdq.estimate(skipped, horizon=40), expected, rtol=1e-9)


def test_several_horizons_are_those_taken_alone():
    options = {"normalise": ["group_means", "inverse_propensity"]}
    together = qdq.replicate(SCENARIO, qdq.Bernoulli(0.5), 3000, 8, horizon=[5, 50, 500], **options)
    for horizon in (5, 50, 500):
        alone = qdq.replicate(SCENARIO, qdq.Bernoulli(0.5), 3000, 8, horizon=horizon, **options)
        mine = together[together["horizon"].eq(horizon)].reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, alone[1:].reset_index(drop=True), check_exact=True)


def test_tasks_in_system_are_recorded_across_chunks(chunk):
    whole = qdq.simulate(PERIODIC, qdq.Bernoulli(0.5), 1500, seed=9, record=("in_system",))
    chunk(64)
    parts = qdq.simulate(PERIODIC, qdq.Bernoulli(0.5), 1500, seed=9, record=("in_system",))
    np.testing.assert_array_equal(parts.in_system, whole.in_system)
    np.testing.assert_array_equal(parts.server, whole.server)
    np.testing.assert_allclose(parts.departure, whole.departure, rtol=1e-12)


def test_replicate_refuses_what_it_cannot_do():
    for design in (qdq.AllControl(), [qdq.Bernoulli(0.5)], "Bernoulli"):
        with pytest.raises((TypeError, ValueError), match="design"):
            qdq.replicate(SCENARIO, design, 100, 1)
    with pytest.raises(ValueError, match="level"):
        qdq.replicate(SCENARIO, qdq.Bernoulli(0.5), 1000, 1, level=1.0)
    with pytest.raises(ValueError, match="seed='a'"):
        qdq.replicate(SCENARIO, qdq.Bernoulli(0.5), 1000, "a")
    trace = SCENARIO.replace(arrivals=qdq.ArrivalTrace(np.arange(50.0)), allow_unstable=True)
    with pytest.raises(ValueError, match="length of the trace"):
        qdq.replicate(trace, qdq.Bernoulli(0.5), 100, 1, 0.0, horizon=5)
    with pytest.raises(ValueError, match="warm_up"):
        qdq.replicate(trace, qdq.Bernoulli(0.5), 50, 1, 1.0, horizon=5)


PEAK = """
import resource, qdq

def peak(n_tasks, design):
    qdq.replicate(qdq.Scenario(), design, n_tasks, 1, 0.0, horizon=[100, 480])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

for design in (qdq.Bernoulli(), qdq.Switchback(1.0), qdq.ServerSplit()):
    print(peak(10**6, design), peak(10**7, design))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_memory_does_not_grow_with_the_number_of_tasks():
    run = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=300
    )
    for line in run.stdout.splitlines():
        small, large = map(int, line.split())
        assert large - small < 10_000  # a log of the larger run would take 210,000
