"""Experiments fed in chunks: the sums are those of the whole log, whatever the chunks."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qdq
from qdq.streaming import Blocks

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
        assert one[name].isna().equals(two[name].isna())
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
    [
        (qdq.Switchback(9.0), 0.0),
        (qdq.Switchback(9.0), 4.0),
        (qdq.Switchback(1.0), 0.25),
        (qdq.ServerSplit(0.5), 0.0),
    ],
)
def test_other_designs_in_chunks(chunk, design, washout, size):
    scenario = PERIODIC.replace(service_rates=1.0)  # so that the groups of a split are equal
    expected = qdq.estimate(qdq.simulate(scenario, design, 1500, seed=6), washout=washout)
    assert expected["standard_error"].gt(0.0).all()
    chunk(size)
    streamed = qdq.replicate(scenario, design, 1500, 6, washout=washout)
    assert_same(streamed, expected, rtol=1e-9)


def test_a_split_of_unequal_groups_in_chunks(chunk):
    log = qdq.simulate(PERIODIC, qdq.ServerSplit(0.5), 1500, seed=6)
    with pytest.warns(UserWarning, match="server_split has no standard error"):
        expected = qdq.estimate(log)
    assert expected[["standard_error", "low", "high"]].isna().all(axis=None)
    chunk(50)
    assert_same(qdq.replicate(PERIODIC, qdq.ServerSplit(0.5), 1500, 6), expected, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*windows side by side:UserWarning")
@pytest.mark.parametrize("variance", qdq.estimators.VARIANCES)
def test_a_skipped_stretch_in_chunks(chunk, variance):
    log = qdq.simulate(SCENARIO, qdq.Bernoulli(0.5), 1500, seed=7)
    skipped = qdq.TaskLog(
        arrival=log.arrival, departure=log.departure, treated=log.treated, skip=200.0
    )
    expected = qdq.estimate(skipped, horizon=40, variance=variance)
    chunk(100)
    again = qdq.estimate(skipped, horizon=40, variance=variance)
    assert_same(again, expected, rtol=1e-9)


def fill(values, cuts, units):
    """Add values in pieces to the sums of blocks, with the number that will come told or not."""
    blocks = Blocks(1, units)
    for begin, end in zip([0, *cuts], [*cuts, values.size], strict=True):
        blocks.make_room(end)
        np.add.at(blocks.sums[:, 0, 0], np.arange(begin, end) // blocks.length, values[begin:end])
    return blocks


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=3000).map(np.array),
    parts=st.lists(st.floats(0.0, 1.0), max_size=9),
    told=st.booleans(),
)
def test_blocks_depend_on_the_number_of_units_alone(values, parts, told):
    cuts = sorted(int(part * values.size) for part in parts)
    blocks = fill(values, cuts, values.size if told else 0)
    length = 1
    while length * 256 < values.size:
        length *= 2
    assert blocks.length == length
    padded = np.pad(values, (0, 256 * length - values.size))
    np.testing.assert_array_equal(blocks.sums[:, 0, 0], padded.reshape(256, length).sum(axis=1))
    assert not blocks.sums[:, 1].any()


def test_blocks_keep_within_256_of_any_number_of_units():
    for units in (1, 255, 256, 257, 512, 513, 10**6, 2**40):
        length = Blocks(3, units).length
        assert -(-units // length) <= 256
        assert length == 1 or units // length >= 128
        assert length & (length - 1) == 0


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
