"""TaskLog: what it refuses, and that files and frames give back what was put in."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import itertools
import json
import os
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import njit

import qdq
from qdq import TaskLog

COLUMNS = {
    "arrival": np.float64,
    "departure": np.float64,
    "treated": np.bool_,
    "server": np.int32,
    "service_time": np.float64,
    "in_system": np.int64,
    "period": np.int64,
    "choice_control": np.int32,
    "choice_treatment": np.int32,
    "candidates": np.int32,
    "queue_lengths": np.int32,
}
FORMATS = ("log.csv", "log.csv.gz", "log.parquet")


def assert_same(one: TaskLog, other: TaskLog) -> None:
    """Assert that two logs agree in every column and every field, bit for bit."""
    for field in dataclasses.fields(TaskLog):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert isinstance(b, np.ndarray), field.name
            assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
            assert a.tobytes() == b.tobytes(), field.name
        else:
            assert (type(a), a) == (type(b), b), field.name


def small_log(**changes: Any) -> TaskLog:
    """Return a log of four tasks with every column and every field."""
    values = {
        "arrival": [0.0, 0.1, 0.1, 1 / 3],
        "departure": [0.2, 5e-324 + 0.1, 2.0, 1e300],
        "treated": [True, False, False, True],
        "server": [0, 1, 1, 2],
        "service_time": [0.2, 0.0, 1.9, 1e-300],
        "in_system": [7, 8, 9, 2**40],
        "period": [0, 0, 0, 1],
        "choice_control": [0, 1, 1, 0],
        "choice_treatment": [0, 2, 2, 2],
        "candidates": [[0, 1], [1, 2], [1, 2], [0, 2]],
        "queue_lengths": [[0, 1, 2], [1, 1, 2], [1, 2, 2], [0, 0, 0]],
        "propensity": 0.1 + 0.2,
        "design": qdq.Switchback(1 / 3, 0.1 + 0.2),
        "n_servers": 3,
        "scenario": qdq.Scenario(n_servers=3, arrivals=qdq.Periodic(0.1, 0.3, 1 / 7)),
        "seed": (2**200, 7),
        "warm_up": 1e-7,
        "skip": 0.05,
        "carried_over": [[1.0, -0.1, 0.1 + 0.2], [2.0, -0.0, 1e-320]],
        "time_unit": 's, of "the" clock\n',
    }
    return TaskLog(**(values | changes))


# --------------------------------------------------------------------------------------------------
# The log itself
# --------------------------------------------------------------------------------------------------


def test_columns_have_their_types_and_cannot_be_written() -> None:
    log = small_log()
    for name, dtype in COLUMNS.items():
        column = getattr(log, name)
        assert column.dtype == dtype, name
        assert column.flags.c_contiguous, name
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        log.response_time[0] = 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        log.skip = 1.0  # type: ignore[misc]


def test_arrays_of_the_right_type_are_not_copied_and_stay_the_callers() -> None:
    arrival = np.array([0.0, 1.0])
    log = TaskLog(arrival=arrival, departure=arrival + 1.0, treated=np.array([0, 1]))
    assert np.shares_memory(log.arrival, arrival)
    assert arrival.flags.writeable


def test_derived_values() -> None:
    log = TaskLog(
        arrival=[5.0, 6.0, 6.0, 7.0], departure=[6.5, 6.0, 9.0, 8.0], treated=[1, 0, 0, 1]
    )
    assert log.n_tasks == 4
    assert log.response_time.tolist() == [1.5, 0.0, 3.0, 1.0]
    assert log.carried_over.shape == (0, 3)
    # Tasks at exactly the first arrival plus skip count.
    for skip, first in ((0.0, 0), (0.5, 1), (1.0, 1), (1.5, 3), (2.0, 3)):
        assert dataclasses.replace(log, skip=skip).first_counted == first


def test_repr_names_what_is_known() -> None:
    log = small_log(skip=0.0, time_unit="s", seed=(3, 7))
    assert repr(log) == (
        "TaskLog(4 tasks over 0.333333 s, 2 treated, 2 control, "
        "design=Switchback(period=0.3333333333333333, propensity=0.30000000000000004), "
        "propensity=0.30000000000000004, n_servers=3, seed=(3, 7))"
    )
    bare = TaskLog(arrival=[0, 1], departure=[1, 2], treated=[0, 0], skip=0.5)
    assert repr(bare) == "TaskLog(2 tasks over 1, 0 treated, 2 control, skip=0.5)"
    page = small_log(time_unit="<b>")._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "candidate_1, queue_length_0" in page


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"arrival": [0.0, 0.1, np.nan, 1.0]}, "task 2, column 'arrival': nan is not finite"),
    ({"departure": [1.0, 2.0, np.inf, 2.0]}, "task 2, column 'departure': inf is not finite"),
    ({"departure": [1, 2, 2, 0.3]}, "task 3, column 'departure': 0.3 is before the arrival, 0.333"),
    (
        {"arrival": [0.0, 0.2, 0.1, 0.3], "departure": [1, 2, 3, 4]},
        "task 2, column 'arrival': 0.1 is before the arrival of the task before, 0.2",
    ),
    ({"treated": [0, 1, 2, 0]}, "task 2, column 'treated': 2 is not 0 or 1"),
    ({"treated": [0, 1, 0.5, 0]}, "task 2, column 'treated': 0.5 is not 0 or 1"),
    ({"treated": list("abcd")}, "column 'treated': a value of type <U1 is not 0 or 1"),
    ({"treated": [True]}, "treated has 1 rows: it must have 4"),
    ({"arrival": np.zeros((4, 1))}, "arrival has shape (4, 1): it must have 1 axes"),
    ({"candidates": [0, 1, 2, 0]}, "candidates has shape (4,): it must have 2 axes"),
    (
        {"server": [0, 1, 2.5, 0]},
        "task 2, column 'server': 2.5 is not a whole number of type int32",
    ),
    ({"server": [0, 1, np.nan, 0]}, "task 2, column 'server': nan is not a whole number"),
    (
        {"server": [0, 1, 2**31, 0]},
        "column 'server': 2147483648 is not a whole number of type int32",
    ),
    ({"server": [0, 1, 3, 0]}, "task 2, column 'server': 3 must be from 0 to 2"),
    (
        {"server": [0, -1, 3, 0], "n_servers": None},
        "task 1, column 'server': -1 must be at least 0",
    ),
    (
        {"candidates": [[0, 1], [0, 3]] * 2},
        "task 1, column 'candidates': [0, 3] must be from 0 to 2",
    ),
    ({"choice_control": [0, 0, 0, 9]}, "task 3, column 'choice_control': 9 must be from 0 to 2"),
    ({"service_time": [0, 0, -1, 0]}, "task 2, column 'service_time': -1.0 must be at least 0"),
    ({"service_time": [0, 0, np.nan, 0]}, "task 2, column 'service_time': nan is not finite"),
    ({"in_system": [0, 0, -1, 0]}, "task 2, column 'in_system': -1 must be at least 0"),
    (
        {"queue_lengths": [[0, 0, -1]] * 4},
        "task 0, column 'queue_lengths': [0, 0, -1] must be at least",
    ),
    (
        {"queue_lengths": [[0, 0]] * 4},
        "queue_lengths has shape (4, 2): it must have one column for",
    ),
    ({"n_servers": 0}, "n_servers=0 is not allowed"),
    ({"n_servers": "20"}, "n_servers='20' is not an integer"),
    ({"propensity": 1.5, "design": None}, "propensity=1.5 is not allowed"),
    (
        {"propensity": 0.0, "design": None},
        "propensity=0.0 is not allowed: propensity must be strictly",
    ),
    (
        {"propensity": 1.0, "design": None},
        "propensity=1.0 is not allowed: propensity must be strictly",
    ),
    ({"propensity": 0.4}, "propensity=0.4 is not allowed: propensity must be 0.30000000000000004"),
    ({"design": "bernoulli"}, "design='bernoulli' is not a design"),
    ({"scenario": {}}, "scenario={} is not a Scenario"),
    ({"seed": 1.5}, "seed=1.5 is not allowed"),
    ({"seed": (1, -1)}, "seed=-1 is not allowed"),
    ({"warm_up": -1.0}, "warm_up=-1.0 is not allowed"),
    ({"skip": -1.0}, "skip=-1.0 is not allowed"),
    ({"skip": 0.34}, "skip=0.34 is not allowed: skip must be less than the log's span, 0.333"),
    ({"carried_over": [[1.0, 2.0]]}, "carried_over has shape (1, 2): it must hold rows of server"),
    ({"carried_over": [[1.0, 2.0, np.nan]]}, "carried_over has shape (1, 3): it must hold rows of"),
    ({"time_unit": 1}, "time_unit=1 is not a string"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_wrong_is_refused_and_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        small_log(**changes)


def test_an_empty_log_is_refused() -> None:
    with pytest.raises(ValueError, match="arrival is empty"):
        TaskLog(arrival=[], departure=[], treated=[])


@pytest.mark.parametrize(("arm", "propensity"), [(False, 0.0), (True, 1.0)])
def test_logs_of_one_arm_may_say_so(arm: bool, propensity: float) -> None:
    log = small_log(treated=[arm] * 4, propensity=propensity, design=None)
    assert log.propensity == propensity


# --------------------------------------------------------------------------------------------------
# Round trips
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_files_keep_every_column_and_every_field(tmp_path: Path, name: str) -> None:
    log = small_log()
    log.write(tmp_path / name)
    assert_same(TaskLog.read(tmp_path / name), log)
    assert [p.name for p in tmp_path.iterdir()] == [name]  # no scratch file is left


def test_frames_keep_every_column_and_every_field() -> None:
    log = small_log()
    frame = log.to_frame()
    assert list(frame.columns) == [
        *list(COLUMNS)[:9],
        *("candidate_0", "candidate_1"),
        *("queue_length_0", "queue_length_1", "queue_length_2"),
    ]
    assert_same(TaskLog.from_frame(frame), log)


@st.composite
def logs(draw: st.DrawFn) -> TaskLog:
    n = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    times = st.floats(allow_nan=False, allow_infinity=False, width=64)
    pairs = [sorted(draw(st.tuples(times, times))) for _ in range(n)]
    arrival, departure = np.array(sorted(pairs)).T
    values: dict[str, Any] = {
        "arrival": arrival,
        "departure": departure,
        "treated": rng.random(n) < 0.5,
        "service_time": np.abs(np.array([draw(times) for _ in range(n)])),
        "in_system": rng.integers(0, 2**62, n),
        "period": rng.integers(-(2**62), 2**62, n),
        "candidates": rng.integers(0, 9, (n, draw(st.integers(1, 12)))),
        "queue_lengths": rng.integers(0, 2**31, (n, 9)),
        "carried_over": np.array(
            [[draw(times) for _ in range(3)] for _ in range(draw(st.integers(0, 2)))]
        ),
    }
    values |= {
        name: rng.integers(0, 9, n) for name in ("server", "choice_control", "choice_treatment")
    }
    values["carried_over"] = values["carried_over"].reshape(-1, 3)
    optional = sorted(set(values) - {"arrival", "departure", "treated"})
    values = {k: v for k, v in values.items() if k not in optional or draw(st.booleans())}
    design = draw(
        st.one_of(
            st.none(),
            st.floats(0.01, 0.99).map(qdq.Bernoulli),
            st.floats(1e-3, 1e3).map(qdq.Switchback),
            st.floats(0.01, 0.99).map(qdq.ServerSplit),
            st.sampled_from([qdq.AllControl(), qdq.AllTreatment()]),
        )
    )
    scenario = draw(
        st.one_of(
            st.none(),
            st.builds(
                qdq.Scenario,
                arrivals=st.floats(0.01, 0.9).map(qdq.Poisson),
                service=st.sampled_from([qdq.Exponential(), qdq.Pareto(2.1), qdq.Deterministic()]),
                control=st.sampled_from([qdq.JoinIdleQueue(), qdq.PowerOfD(2), qdq.RoundRobin()]),
                information_delay=st.floats(0, 5),
            ),
        )
    )
    whole = st.integers(0, 2**128)
    return TaskLog(
        **values,
        propensity=getattr(design, "propensity", None) or draw(st.none() | st.floats(0.01, 0.99)),
        design=design,
        n_servers=draw(st.sampled_from([None, 9])),
        scenario=scenario,
        seed=draw(st.one_of(st.none(), whole, st.lists(whole, max_size=3).map(tuple))),
        warm_up=draw(st.none() | st.floats(0, 1e300)),
        time_unit=draw(st.none() | st.text()),
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(log=logs(), name=st.sampled_from(FORMATS))
def test_random_logs_come_back_bit_for_bit(tmp_path: Path, log: TaskLog, name: str) -> None:
    log.write(tmp_path / name)
    assert_same(TaskLog.read(tmp_path / name), log)
    assert_same(TaskLog.from_frame(log.to_frame()), log)


def test_a_simulated_log_comes_back(tmp_path: Path) -> None:
    scenario = qdq.Scenario(n_servers=5, arrivals=qdq.Poisson(0.7))
    record = ("service_time", "in_system", "candidates", "choices", "queue_lengths")
    log = qdq.simulate(scenario, qdq.Switchback(20.0), n_tasks=500, seed=(3, 7), record=record)
    assert len(log.carried_over) > 0
    for name in FORMATS:
        log.write(tmp_path / name)
        assert_same(TaskLog.read(tmp_path / name), log)


@pytest.mark.parametrize("name", FORMATS)
def test_equal_logs_give_equal_files(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for clock, folder in enumerate(("a", "b")):
        monkeypatch.setattr(time, "time", lambda clock=clock: 1e9 + clock)
        (tmp_path / folder).mkdir()
        small_log().write(tmp_path / folder / name)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_csv_can_be_read_elsewhere(tmp_path: Path) -> None:
    log = small_log()
    log.write(tmp_path / "log.csv")
    frame = pd.read_csv(tmp_path / "log.csv", skiprows=1)
    assert list(frame.columns) == list(log.to_frame().columns)
    np.testing.assert_allclose(frame["departure"], log.departure, rtol=1e-15, atol=0.0)
    assert frame["treated"].dtype == np.int64
    assert frame["treated"].tolist() == [1, 0, 0, 1]
    first = (tmp_path / "log.csv").read_text().split("\n")[0]
    assert json.loads(first.removeprefix("# qdq "))["seed"] == [2**200, 7]


@pytest.mark.parametrize("name", FORMATS)
def test_given_values_win_over_those_in_a_file(tmp_path: Path, name: str) -> None:
    small_log(design=None, queue_lengths=None).write(tmp_path / name)
    log = TaskLog.read(tmp_path / name, skip=0.2, propensity=0.7, n_servers=9)
    assert (log.skip, log.propensity, log.n_servers) == (0.2, 0.7, 9)
    log = TaskLog.from_frame(small_log().to_frame(), design=qdq.Bernoulli(0.25), time_unit="s")
    assert (log.design, log.propensity, log.time_unit) == (qdq.Bernoulli(0.25), 0.25, "s")


@pytest.mark.parametrize("name", FORMATS)
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = small_log()
    log.write(tmp_path / name)
    old = (tmp_path / name).read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        small_log(seed=1).write(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == old


@pytest.mark.filterwarnings("ignore:the stability of a UserPolicy")
def test_a_users_policy_is_left_out_with_a_warning(tmp_path: Path) -> None:
    @njit
    def choose(queue_lengths, work, rates, candidates, u):  # type: ignore[no-untyped-def]
        return candidates[0]

    scenario = qdq.Scenario(n_servers=3, treatment=qdq.UserPolicy(choose))
    log = small_log(scenario=scenario)
    with pytest.warns(UserWarning, match="the scenario is left out: .* cannot be written"):
        log.write(tmp_path / "log.csv")
    assert_same(TaskLog.read(tmp_path / "log.csv"), dataclasses.replace(log, scenario=None))


@pytest.mark.parametrize("name", ["log", "log.json", "log.gz", "log.parquet.gz", "csv"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"ends in \.csv, \.csv\.gz or \.parquet"):
        small_log().write(tmp_path / name)
    (tmp_path / name).touch()
    with pytest.raises(
        ValueError, match=r"ends in \.csv, \.csv\.gz, \.parquet, \.log or \.log\.gz"
    ):
        TaskLog.read(tmp_path / name)
    with pytest.raises(
        ValueError, match="format='json' is not allowed: format must be one of csv,"
    ):
        TaskLog.read(tmp_path / name, format="json")


def test_a_missing_file_is_the_usual_error(tmp_path: Path) -> None:
    for name in (*FORMATS, "a.log"):
        with pytest.raises(FileNotFoundError):
            TaskLog.read(tmp_path / name)


# --------------------------------------------------------------------------------------------------
# Files and frames from outside
# --------------------------------------------------------------------------------------------------

HEAD = "arrival,departure,treated\n"
OURS = (
    '# qdq {"n_tasks": 2, "propensity": null, "design": null, "n_servers": null, "scenario": null, '
)
OURS += '"seed": null, "warm_up": null, "skip": 0.0, "carried_over": [], "time_unit": null}\n'
WIDE = "arrival,departure,treated,server,candidate_0,candidate_1\n"
MICRO = 1_796_018_885_427_753


def kv(start: int, end: int, arm: object = 1, rest: str = "") -> str:
    return f"t={MICRO + start} te={MICRO + end} arm={arm}{rest}\n"


def http(
    ms: int = 655,
    *,
    server: str = "app/s1",
    timers: str = "10/0/30/69/109",
    headers: str = " {1wt.eu|1} {}",
    date: str = "06/Feb/2009:12:14:14",
) -> str:
    return (
        f"Feb  6 12:14:14 localhost haproxy[14389]: 10.0.1.2:33317 [{date}.{ms:03d}] http-in "
        f'{server} {timers} 200 2750 - - ---- 1/1/1/1/0 0/0{headers} "GET /a b?t=1 HTTP/1.1"\n'
    )


MALFORMED: list[tuple[str, str | bytes, str]] = [
    # (name, text, message after the path)
    ("a.csv", "", " is empty"),
    ("a.csv", " \n\n", " is empty"),
    ("a.csv", HEAD, " has no rows"),
    (
        "a.csv",
        "arrival;departure;treated\n0;1;1\n",
        ": column 'arrival' is missing; found arrival;d",
    ),
    (
        "a.csv",
        "arrival,departure\n0,1\n",
        ": column 'treated' is missing; found arrival, departure",
    ),
    ("a.csv", "0,1,1\n1,2,0\n", ": column 'arrival' is missing; found 0, 1, 1"),
    (
        "a.csv",
        "arrival,departure,treated,arrival\n0,1,1,0\n",
        ": column 'arrival' is there more than",
    ),
    ("a.csv", HEAD + "0,1,1\n1,x,0\n", ", line 3, column 'departure': 'x' is not a number"),
    ("a.csv", HEAD + "0,1,1\n1,2,0\nx,2,y\n", ", line 4, column 'arrival': 'x' is not a number"),
    (
        "a.csv",
        "\n\n" + HEAD + "0,1,1\n\n1,x,0\n",
        ", line 6, column 'departure': 'x' is not a number",
    ),
    ("a.csv", HEAD + "0,1,1\r\n\r\n1,x,0\r\n", ", line 4, column 'departure': 'x' is not a number"),
    ("a.csv", HEAD + "0,1,1\n1,,0\n", ", line 3, column 'departure': is missing or not a number"),
    ("a.csv", HEAD + "0,1,1\nNaN,1,0\n", ", line 3, column 'arrival': is missing or not a number"),
    ("a.csv", HEAD + "0,1,1\n-inf,1,0\n", ", line 3, column 'arrival': -inf is not finite"),
    ("a.csv", HEAD + "0,1e999,1\n", ", line 2, column 'departure': inf is not finite"),
    (
        "a.csv",
        HEAD + "0,1,1\n2020-01-01,2,0\n",
        ", line 3, column 'arrival': '2020-01-01' is not a",
    ),
    (
        "a.csv",
        HEAD + "0,1,1\n1,0.5,0\n",
        ", line 3, column 'departure': 0.5 is before the arrival, 1.0",
    ),
    (
        "a.csv",
        HEAD + "5,6,1\n1,0.5,0\n",
        ", line 3, column 'departure': 0.5 is before the arrival, 1.0",
    ),
    ("a.csv", HEAD + "0,1,1\n1,2,2\n", ", line 3, column 'treated': '2' is not 0 or 1"),
    ("a.csv", HEAD + "0,1,1\n1,2,B\n", ", line 3, column 'treated': 'B' is not 0 or 1"),
    ("a.csv", HEAD + "0,1,1\n1,2\n2,3,0\n", ", line 3: has 2 columns, it must have 3"),
    ("a.csv", HEAD + "0,1,1\n\n1,2,0,9\n", ", line 4: has 4 columns, it must have 3"),
    ("a.csv", HEAD + "0,1,1\n0,1,0\n0,1,1\n", ", line 4: repeats line 2 in every column"),
    ("a.csv", HEAD[:-1] + ",id\n0,1,1,7\n\n0,1,1,7\n", ", line 4: repeats line 2 in every column"),
    ("a.csv", WIDE + "0,1,1,1.5,0,0\n", ", line 2, column 'server': '1.5' is not a whole number"),
    ("a.csv", WIDE + "0,1,1,-1,0,0\n", ", line 2, column 'server': -1 must be at least 0"),
    ("a.csv", WIDE + "0,1,1,1,0,-3\n", ", line 2, column 'candidates': [0, -3] must be at least 0"),
    ("a.csv", WIDE + "0,1,1,1,0,\n", ", line 2, column 'candidate_1': is missing or not a number"),
    ("a.csv", WIDE.replace("_0", "_2") + "0,1,1,1,0,0\n", ": column candidate_0 is missing, and"),
    ("a.csv", HEAD.encode("utf-16"), ", line 1, column 1: byte 0xff is not UTF-8 text"),
    (
        "a.csv",
        HEAD.encode() + b"0,1,1\n1,\xe9,0\n",
        ", line 3, column 3: byte 0xe9 is not UTF-8 text",
    ),
    ("a.csv", HEAD + "0,1,1\n1,\0,0\n", ", line 3, column 3: a zero byte is not UTF-8 text"),
    (
        "a.csv",
        "# qdq {\n" + HEAD + "0,1,1\n",
        ": the 'qdq' line or metadata on the experiment is dam",
    ),
    (
        "a.csv",
        "# qdq []\n" + HEAD + "0,1,1\n",
        ": the 'qdq' line or metadata on the experiment is dam",
    ),
    ("a.csv", OURS + HEAD + "0,1,1\n1,2,x\n", ", line 4, column 'treated': 'x' is not 0 or 1"),
    ("a.csv", OURS + HEAD + "0,1,1\n", " has 1 rows and should have 2: rows were lost or added"),
    (
        "a.csv",
        OURS.replace("skip", "ship") + HEAD + "0,1,1\n1,2,0\n",
        "should not have: ship, skip",
    ),
    (
        "a.csv",
        OURS.replace('"design": null', '"design": {"type": "Coin"}') + HEAD + "0,1,1\n1,2,0\n",
        "is damaged: type='Coin' is not allowed",
    ),
    ("a.parquet", "", " is not a whole Parquet file"),
    ("a.parquet", HEAD, " is not a whole Parquet file"),
    ("a.log", "", " is empty"),
    ("a.log", "hello\n", ", line 1: 'hello' is neither fields such as"),
    ("a.log", "te=2 arm=1\n", ", line 1: field 't' is missing"),
    ("a.log", "t=1 te=2\n", ", line 1: field 'arm' is missing"),
    ("a.log", kv(0, 9) + "\nt=1 arm=0\n", ", line 3: field 'te' is missing"),
    (
        "a.log",
        kv(0, 9) + "te=9 t=1 arm=0\n",
        ", line 2: the fields are not those of the first line",
    ),
    (
        "a.log",
        kv(0, 9) + kv(1, 9, rest=" x=1"),
        ", line 2: the fields are not those of the first line",
    ),
    ("a.log", "t=1 te=2 arm=1 te=3\n", ", line 1: field 'te' is there more than once"),
    ("a.log", kv(0, 9) + "t=1.5 te=2 arm=1\n", ", line 2, column 't': '1.5' is not a whole number"),
    ("a.log", kv(0, 9) + "t=1 te=- arm=1\n", ", line 2, column 'te': '-' is not a whole number"),
    ("a.log", kv(0, 9) + kv(1, 9, arm=""), ", line 2, column 'arm': '' is not a whole number"),
    ("a.log", kv(0, 9) + kv(1, 9, arm=2), ", line 2, column 'arm': 2 is not 0 or 1"),
    ("a.log", kv(0, 9) + kv(2, 1), ", line 2, column 'te': 1e-06 is before the arrival, 2e-06"),
    ("a.log", kv(0, 9) + kv(1, 9) + kv(0, 9), ", line 3: repeats line 1"),
    (
        "a.log",
        kv(0, 9, rest=" srv=web"),
        ", line 1, column 'srv': 'web' must end in the server's num",
    ),
    ("a.log", kv(0, 9, rest=" svc=fast"), ", line 1, column 'svc': 'fast' is not a number"),
    ("a.log", kv(0, 9, rest=" svc=nan"), ", line 1, column 'svc': nan is not finite"),
    ("a.log", kv(0, 9, rest=" svc=-0.1"), ", line 1, column 'svc': -0.1 must be at least 0"),
    ("a.log", kv(0, 9, rest=" a=1 b=-2"), ", line 1, column 'a, b': [1, -2] must be at least 0"),
    ("a.log", b"t=1 te=2 arm=1\nt=1 te=\xff arm=1\n", ", line 2, column 8: byte 0xff is not UTF-8"),
    (
        "a.log",
        http() + "haproxy[1]: Proxy app stopped\n",
        ", line 2: 'haproxy[1]: Proxy app stopped' is",
    ),
    (
        "a.log",
        http() + http(656, headers=""),
        ", line 2, column 'captured request headers': {} must",
    ),
    (
        "a.log",
        http(headers=" {x|y}"),
        ", line 1, column 'captured request headers': {x|y} must hold",
    ),
    (
        "a.log",
        http() + http(headers=" {x|}"),
        ", line 2, column 'captured request headers': {x|} must",
    ),
    (
        "a.log",
        http() + http(headers=" {0}"),
        "{0} must hold the arm as 0, 1, control or treatment in field 2",
    ),
    (
        "a.log",
        http() + http(timers="1/2/3/4/+9"),
        ", line 2, column 'Ta': '+9' was logged before the",
    ),
    (
        "a.log",
        http() + http(timers="10/0/0/0/9"),
        ", line 2, column 'Ta': -0.001 is before the arrival",
    ),
    (
        "a.log",
        http(date="31/Feb/2009:12:14:14"),
        ", line 1, column 'date': '31/Feb/2009' is not a date",
    ),
    (
        "a.log",
        http(date="06/Fev/2009:12:14:14"),
        ", line 1, column 'date': '06/Fev/2009' is not a date",
    ),
    (
        "a.log",
        http() + http(date="06/Feb/2009:24:00:00"),
        ", line 2, column 'date': the hour is 24, at",
    ),
    (
        "a.log",
        http() + http(date="06/Feb/2009:12:60:00"),
        ", line 2, column 'date': the minute is 60",
    ),
    ("a.log", http() + http(), ", line 2: repeats line 1"),
    ("a.log", http(timers="-1/-1/-1/-1/9"), " has no request that a server answered"),
]


@pytest.mark.parametrize(("name", "text", "message"), MALFORMED)
def test_malformed_files_are_refused_with_line_and_column(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    path = tmp_path / name
    data = text if isinstance(text, bytes) else text.encode()
    for packed in (data, gzip.compress(data)) if name != "a.parquet" else (data,):
        path.write_bytes(packed)
        with pytest.raises(ValueError, match=re.escape(message)) as refusal:
            TaskLog.read(path)
        assert str(refusal.value).startswith(str(path))


def test_there_are_enough_malformed_logs() -> None:
    assert len(set(MALFORMED)) == len(MALFORMED) > 40


@pytest.mark.parametrize("name", ["a.csv.gz", "a.log.gz"])
def test_a_gzip_file_that_was_cut_or_damaged_is_refused(tmp_path: Path, name: str) -> None:
    if name == "a.csv.gz":
        text = HEAD + "".join(f"{i},{i + 1},{i % 2}\n" for i in range(1000))
    else:
        text = "".join(kv(i, i + 9, i % 2) for i in range(1000))
    data = gzip.compress(text.encode())
    path = tmp_path / name
    for end in (2, 10, len(data) // 2, len(data) - 8, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match="is cut short: the gzip file has no end"):
            TaskLog.read(path)
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes(4) + data[middle + 4 :])
    with pytest.raises(ValueError, match="is a damaged gzip file"):
        TaskLog.read(path)
    path.write_bytes(data)
    assert TaskLog.read(path).n_tasks == 1000


def test_a_csv_and_a_parquet_that_were_cut_are_refused(tmp_path: Path) -> None:
    log = small_log()
    log.write(tmp_path / "a.csv")
    lines = (tmp_path / "a.csv").read_text().splitlines(keepends=True)
    (tmp_path / "a.csv").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="has 3 rows and should have 4"):
        TaskLog.read(tmp_path / "a.csv")
    log.write(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match="is not a whole Parquet file"):
        TaskLog.read(tmp_path / "a.parquet")


FRAME = {"arrival": [0.0, 1.0], "departure": [1.0, 2.0], "treated": [1, 0]}
BAD_FRAMES: list[tuple[dict[str, Any], str]] = [
    ({"departure": ["1", "2"]}, "row 0, column 'departure': '1' is not a number"),
    ({"departure": [1.0, None]}, "row 1, column 'departure': is missing or not a number"),
    ({"departure": [1.0, 0.5]}, "row 1, column 'departure': 0.5 is before the arrival, 1.0"),
    ({"arrival": pd.to_datetime(["2020-01-01"] * 2)}, "give times as numbers since the start"),
    ({"treated": [1.0, 0.5]}, "row 1, column 'treated': 0.5 is not 0 or 1"),
    ({"server": [1.0, np.nan]}, "row 1, column 'server': is missing or not a number"),
    ({"candidate_1": [0, 1]}, "column candidate_0 is missing, and candidate_1 is not"),
    (
        {"arrival": [0, 0], "departure": [1, 1], "treated": [1, 1], "note": [[1], [1]]},
        "frame, row 1: repeats row 0 in every column",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_FRAMES)
@pytest.mark.parametrize("kind", ["frame", "parquet"])
def test_malformed_frames_and_parquets_are_refused_with_row_and_column(
    tmp_path: Path, changes: dict[str, Any], message: str, kind: str
) -> None:
    frame = pd.DataFrame(FRAME | changes)

    def read() -> TaskLog:
        if kind == "frame":
            return TaskLog.from_frame(frame)
        frame.to_parquet(tmp_path / "a.parquet", index=False)
        return TaskLog.read(tmp_path / "a.parquet")

    with pytest.raises(ValueError, match=re.escape(message.removeprefix("frame, "))) as refusal:
        read()
    assert str(refusal.value).startswith("frame" if kind == "frame" else str(tmp_path))


def test_other_malformed_frames() -> None:
    with pytest.raises(TypeError, match="frame is a dict: it must be a pandas DataFrame"):
        TaskLog.from_frame(FRAME)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frame, row 1, column 'departure': 'x' is not a number"):
        TaskLog.from_frame(pd.DataFrame(FRAME | {"departure": [1.0, "x"]}))
    with pytest.raises(ValueError, match="frame has no rows"):
        TaskLog.from_frame(pd.DataFrame(FRAME).iloc[:0])
    with pytest.raises(ValueError, match="frame: column 'treated' is missing; found arrival, dep"):
        TaskLog.from_frame(pd.DataFrame(FRAME).drop(columns="treated"))
    twice = pd.concat([pd.DataFrame(FRAME), pd.DataFrame(FRAME)], axis=1)
    with pytest.raises(ValueError, match="frame: column 'arrival' is there more than once"):
        TaskLog.from_frame(twice)
    with pytest.raises(ValueError, match="frame has 3 rows and should have 4"):
        TaskLog.from_frame(small_log().to_frame().iloc[1:])


def test_what_frames_may_hold() -> None:
    frame = pd.DataFrame(
        {
            "treated": pd.array([True, False, True], dtype="boolean"),
            "departure": np.array([3, 3, 4], dtype=np.int16),
            "arrival": np.array([1.5, 1.5, 2.0], dtype=np.float32),
            "server": pd.array([2, 0, 1], dtype="Int64"),
            "note": [None, [1], "x"],
        },
        index=[7, 7, 7],
    )
    log = TaskLog.from_frame(
        frame, skip=0.25, design=qdq.Bernoulli(0.3), n_servers=3, time_unit="s"
    )
    expected = TaskLog(
        arrival=[1.5, 1.5, 2.0],
        departure=[3, 3, 4],
        treated=[1, 0, 1],
        server=[2, 0, 1],
        skip=0.25,
        design=qdq.Bernoulli(0.3),
        propensity=0.3,
        n_servers=3,
        time_unit="s",
    )
    assert_same(log, expected)


def test_what_a_csv_may_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    text = '\ufeff"treated", arrival ,departure,note,note\r\n\r\nTrue, 1e-1 ,0.3,"a,b",\r\n'
    path.write_text(text + "0,2,3,,x\r\n", newline="")
    log = TaskLog.read(path, skip=1.0, propensity=0.5, n_servers=4)
    expected = TaskLog(
        arrival=[0.1, 2.0],
        departure=[0.3, 3.0],
        treated=[1, 0],
        skip=1.0,
        propensity=0.5,
        n_servers=4,
    )
    assert_same(log, expected)
    path.rename(tmp_path / "a.txt")
    assert_same(TaskLog.read(tmp_path / "a.txt", "csv", 1.0, 0.5, 4), expected)


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_rows_are_sorted_and_ties_keep_their_order(tmp_path: Path, kind: str) -> None:
    # 400 tasks at 20 instants in a shuffled order: an unstable sort would break ties.
    rng = np.random.default_rng(1)
    arrival = rng.integers(0, 20, 400) / 4
    tag = np.arange(400)
    frame = pd.DataFrame(
        {"arrival": arrival, "departure": arrival + 1, "treated": tag % 2, "in_system": tag}
    )
    frame["candidate_0"], frame["candidate_1"] = tag, tag + 1

    def read() -> TaskLog:
        if kind == "frame":
            return TaskLog.from_frame(frame)
        path = tmp_path / f"a.{kind}"
        getattr(frame, f"to_{kind}")(path, index=False)
        return TaskLog.read(path)

    with pytest.warns(UserWarning, match="the rows were not in order of arrival and were sorted"):
        log = read()
    expected = sorted(zip(arrival.tolist(), tag.tolist(), strict=True))
    assert log.arrival.tolist() == [a for a, _ in expected]
    assert log.in_system is not None
    assert log.in_system.tolist() == [t for _, t in expected]
    assert log.candidates is not None
    assert log.candidates.tolist() == [[t, t + 1] for _, t in expected]
    assert log.treated.tolist() == [bool(t % 2) for _, t in expected]


def test_repeated_rows_are_taken_in_our_own_files(tmp_path: Path) -> None:
    log = TaskLog(arrival=[0, 0], departure=[1, 1], treated=[1, 1])
    for name in FORMATS:
        log.write(tmp_path / name)
        assert_same(TaskLog.read(tmp_path / name), log)


# --------------------------------------------------------------------------------------------------
# HAProxy logs
# --------------------------------------------------------------------------------------------------


def test_fields_become_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    rest = " srv=s{} x=- svc={} a={} b={} la={} lb={} n=5"
    path.write_text(
        kv(40, 100, 0, rest.format(7, "0.000050", 7, 12, 3, 1))
        + kv(0, 333_333, 1, rest.format(12, "0.25", 7, 12, 3, 2))
        + "\n"
        + kv(40, 1_000_000, 1, rest.format(3, "1e-3", 3, 12, 2, 2))
    )
    log = TaskLog.read(path, propensity=0.5)
    expected = TaskLog(
        arrival=[0.0, 40 / 1e6, 40 / 1e6],
        departure=[333_333 / 1e6, 100 / 1e6, 1.0],
        treated=[1, 0, 1],  # the tie keeps the order of the file
        server=[12, 7, 3],
        service_time=[0.25, 0.00005, 0.001],
        candidates=[[7, 12], [7, 12], [3, 12]],
        choice_control=[7, 7, 3],
        choice_treatment=[12, 12, 3],  # equal loads: a
        propensity=0.5,
        time_unit="s",
    )
    assert_same(log, expected)


@pytest.mark.parametrize("prefix", ["", "Feb  6 12:14:14 host haproxy[1]: ", "<134>1 haproxy: "])
def test_three_fields_are_enough(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "a.log").write_text(prefix + kv(0, 5, 0) + prefix + kv(1, 2, 1))
    log = TaskLog.read(tmp_path / "a.log")
    expected = TaskLog(arrival=[0, 1e-6], departure=[5e-6, 2e-6], treated=[0, 1], time_unit="s")
    assert_same(log, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_http_lines(tmp_path: Path, packed: bool) -> None:
    lines = [
        # The manual's own example, the arm added to its captured headers.
        http(655, timers="10/0/30/69/109"),
        # No syslog before it, a cookie, IPv6, a redispatch, a longer wait; ends past midnight.
        "::1:4 [06/Feb/2009:23:59:59.999] http-in~ app/s10 0/1230/7/147/70000 502 +24 a=b - PH--"
        ' 3/3/3/1/+2 0/9 {|0} "GET / HTTP/1.0" extra 1\n',
        http(655, server="app/s2", timers="0/0/0/0/0", headers=" {a b|Treatment}"),
        "unix:1 [07/Feb/2009:00:00:00.000] f app/s10 1/0/0/0/1 200 2 - - ---- 1/1/1/1/0 0/0"
        ' {x|CONTROL|1} ""\n',
    ]
    data = "".join(lines).encode()
    path = tmp_path / "a.log.gz"  # told by its first bytes, not by its name
    path.write_bytes(gzip.compress(data) if packed else data)
    log = TaskLog.read(path)
    noon, midnight = 12 * 3600 + 14 * 60 + 14.655, 86400.0
    zero = round(noon * 1000)

    def seconds(*times: float) -> list[float]:
        return [(round(t * 1000) - zero) / 1000 for t in times]

    expected = TaskLog(
        # Arrival = date + TR, departure = date + Ta; sorted by arrival.
        arrival=seconds(noon, noon + 0.010, midnight - 0.001, midnight + 0.001),
        departure=seconds(noon, noon + 0.109, midnight + 69.999, midnight + 0.001),
        treated=[1, 1, 0, 0],
        server=[1, 0, 2, 2],  # s1, s2, s10: by number
        time_unit="s",
    )
    assert_same(log, expected)


def test_requests_without_a_response_are_left_out(tmp_path: Path) -> None:
    aborted = [
        http(1, timers="-1/-1/-1/-1/8490", server="app/<NOSRV>", headers=""),
        http(2, timers="5/-1/-1/-1/9", headers=" {|}"),
        http(3, timers="5/0/-1/-1/9"),
        http(4, timers="5/0/0/-1/9"),
        http(5, timers="0/0/0/0/0", server="app/<STATS>"),
    ]
    kept = [http(6), http(7, headers=" {x|0}")]
    path = tmp_path / "a.log"
    for order in ([*aborted, *kept], [*kept, *aborted]):
        path.write_text("".join(order))
        with pytest.warns(UserWarning, match="5 of 7 requests were left out: they were aborted"):
            log = TaskLog.read(path)
        assert log.treated.tolist() == [True, False]
        assert log.arrival.tolist() == [0.0, 0.001]
    # Lines after those left out are still counted as in the file.
    path.write_text("".join(aborted) + kept[0] + http(8, timers="1/1/1/1/+4"))
    with (
        pytest.warns(UserWarning, match="5 of 7"),
        pytest.raises(ValueError, match=r"line 7, column 'Ta': '\+4'"),
    ):
        TaskLog.read(path)


# --------------------------------------------------------------------------------------------------
# Logs that were cut
# --------------------------------------------------------------------------------------------------


def simulated(seed: int) -> pd.DataFrame:
    scenario = qdq.Scenario(n_servers=50, arrivals=qdq.Poisson(0.8), control=qdq.PowerOfD(1))
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), n_tasks=8000, seed=seed)
    frame = log.to_frame()
    frame.attrs = {}
    return frame


CUT = "may have been cut while tasks were running"


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(path, index=False)


@pytest.mark.parametrize(("write", "name"), [(write_csv, "a.csv"), (write_parquet, "a.parquet")])
def test_a_cut_log_is_warned_of(
    tmp_path: Path, write: Callable[[pd.DataFrame, Path], None], name: str
) -> None:
    for seed in range(5):
        whole = simulated(seed)
        # A log is written as tasks end: those that end after the cut are not in it.
        end = whole["arrival"].quantile(0.9)
        write(whole[whole["departure"] <= end], tmp_path / name)
        with pytest.warns(UserWarning, match=CUT) as caught:
            TaskLog.read(tmp_path / name)
        assert len(caught) == 1
        longest = (whole["departure"] - whole["arrival"])[whole["departure"] <= end].max()
        assert f"arrived in the last {longest:.6g} (the longest" in str(caught[0].message)


def test_whole_and_drained_logs_are_not_warned_of(tmp_path: Path) -> None:
    for seed in range(5):
        whole = simulated(seed)
        for end in (0.9, 1.0):  # all that arrived by then, each until its end
            write_csv(whole.iloc[: int(end * len(whole))], tmp_path / "a.csv")
            TaskLog.read(tmp_path / "a.csv")


def test_cut_logs_of_our_own_and_short_ones_are_not_judged(tmp_path: Path) -> None:
    whole = simulated(0)
    cut = TaskLog.from_frame(whole[whole["departure"] <= whole["arrival"].quantile(0.9)])
    cut.write(tmp_path / "a.csv")  # ours from now on: it says how many rows it has
    TaskLog.read(tmp_path / "a.csv")
    few = whole[whole["departure"] <= whole["arrival"].iloc[150]]
    write_csv(few, tmp_path / "b.csv")
    TaskLog.read(tmp_path / "b.csv")


def test_names_of_candidates_are_sorted_by_number(tmp_path: Path) -> None:
    # Twelve candidates: candidate_10 comes after candidate_9, whatever the order in the file.
    frame = pd.DataFrame(FRAME)
    numbers = list(itertools.chain(range(11, -1, -2), range(0, 12, 2)))
    for i in numbers:
        frame[f"candidate_{i}"] = [i, i + 1]
    write_csv(frame, tmp_path / "a.csv")
    log = TaskLog.read(tmp_path / "a.csv")
    assert log.candidates is not None
    assert log.candidates.tolist() == [list(range(12)), list(range(1, 13))]


def test_spaces_around_cells_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "arrival, departure, treated, server\n0, 1, 1, 0\n 1 ,\t2,\ttrue , 1\n2,3, 0,2\n"
    )
    log = TaskLog.read(path)
    assert log.treated.tolist() == [True, True, False]
    assert log.server is not None
    assert log.server.tolist() == [0, 1, 2]
    path.write_text("arrival, departure, treated\n0, 1,   1\n")
    with pytest.raises(ValueError, match="line 2, column 'treated': '   1' is not 0 or 1"):
        TaskLog.read(path)


def test_a_matrix_without_columns_is_none() -> None:
    assert small_log(candidates=np.empty((4, 0), np.int32)).candidates is None


def test_pickled_columns_stay_read_only() -> None:
    log = small_log()
    assert log.response_time.sum() > 0.0
    for other in (pickle.loads(pickle.dumps(log)), copy.deepcopy(log)):
        assert repr(other) == repr(log)
        for name in ("arrival", "treated", "carried_over", "response_time"):
            assert getattr(other, name).tobytes() == getattr(log, name).tobytes()
            assert not getattr(other, name).flags.writeable
