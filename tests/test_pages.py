"""Rows of each scenario page's table, computed a second time from the definitions alone.

Every page runs with the values of book/params/smoke.yml. From the table `results` that it
publishes, a seeded draw takes a row of each method and arrival rate; its mean and spread over
replications are computed anew, with numpy, from logs that have the arrivals, departures and arms of
its scenario.

For this a page defines, in its first cells, `scenarios`: a scenario for each value, or tuple of
values, of its coordinates, which are columns of `results`; and `seed`. Replication j of a row is
the log of the seed ``(seed, j)``; all else is in the row. Where a row has mirrored pairs, its bias
is by half the difference to as many logs with the arms swapped.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib as mpl
import nbformat
import numpy as np
import pandas as pd
import pytest
import yaml

import build as runner
import qdq
from qdq.publish import published

pytestmark = pytest.mark.long

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted(path.stem for path in (PROJECT / "book" / "scenarios").glob("*.ipynb"))
SMOKE = yaml.safe_load((PROJECT / "book" / "params" / "smoke.yml").read_text("utf-8"))


# --------------------------------------------------------------------------------------------------
# The definitions
# --------------------------------------------------------------------------------------------------


def in_system(log: qdq.TaskLog) -> np.ndarray:
    """Tasks that came before each arrival and have not departed by then."""
    departures = np.sort(np.concatenate((log.departure, log.carried_over[:, 2])))
    earlier = np.arange(log.n_tasks) + len(log.carried_over)
    return earlier - np.searchsorted(departures, log.arrival, side="right")


def waiting(log: qdq.TaskLog) -> np.ndarray:
    """Tasks that came before each arrival and are not in service by then."""
    start = log.departure - log.service_time
    starts = np.sort(np.concatenate((start, log.carried_over[:, 1])))
    earlier = np.arange(log.n_tasks) + len(log.carried_over)
    # A task that need not wait is itself in service by then.
    return earlier - np.searchsorted(starts, log.arrival, side="right") + (start <= log.arrival)


def integral(log: qdq.TaskLog) -> np.ndarray:
    """Integral of the number in system from time 0 to each arrival."""
    begin = np.concatenate((log.arrival, np.zeros(len(log.carried_over))))
    end = np.concatenate((log.departure, log.carried_over[:, 2]))

    def times_up_to(moments: np.ndarray) -> np.ndarray:
        moments = np.sort(moments)
        past = np.searchsorted(moments, log.arrival, side="right")
        total = np.concatenate(([0.0], np.cumsum(moments)))[past]
        return total + (moments.size - past) * log.arrival

    return times_up_to(end) - times_up_to(begin)


def window_sums(values: np.ndarray, horizon: int, first: int) -> np.ndarray:
    """Sums of `horizon` values from place i + first on, for i = 0..n-L-1."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    start = np.arange(values.size - horizon) + first
    return total[start + horizon] - total[start]


def queue_sums(log: qdq.TaskLog, row: Any, horizon: int) -> np.ndarray:
    """Truncated sums of the queue, in the reading of a row."""
    at, last = log.arrival, log.arrival[horizon:]
    if row.queue == "time_average":
        total = integral(log)
        return total[horizon:] - total[:-horizon]
    queue = {"in_system": in_system, "including_self": in_system, "waiting": waiting}[row.queue](
        log
    )
    queue = queue + (row.queue == "including_self")
    if row.arrival_rate == "scenario":
        arrivals = log.scenario.arrivals
        wave = np.sin(2.0 * np.pi * at / getattr(arrivals, "period", 1.0))
        rate = arrivals.rate * (1.0 + getattr(arrivals, "amplitude", 0.0) * wave)
        return window_sums(queue / (log.n_servers * rate), horizon, 1)
    sums = window_sums(queue, horizon, 1)
    if row.arrival_rate == "window":
        return sums * (last - at[:-horizon]) / horizon
    if row.arrival_rate == "estimated":
        return sums * (at[-1] - at[0]) / (at.size - 1)
    return sums / float(row.arrival_rate)


def dq(log: qdq.TaskLog, row: Any) -> float:
    """wDQ, qDQ or their mixture of the least variance."""
    horizon = int(row.horizon)
    treated = log.treated[:-horizon]
    response = window_sums(log.departure - log.arrival, horizon, 0)
    if row.method == "dq_response":
        sums = response[None]
    elif row.method == "dq_queue":
        sums = queue_sums(log, row, horizon)[None]
    else:
        sums = np.stack((response, queue_sums(log, row, horizon)))
    if row.normalise == "group_means":
        value = sums[:, treated].mean(axis=1) - sums[:, ~treated].mean(axis=1)
        covariance = sum(np.cov(sums[:, arm]) / arm.sum() for arm in (treated, ~treated))
    else:
        assert row.normalise == "inverse_propensity"
        p = log.design.propensity
        scores = np.where(treated, 1.0 / p, -1.0 / (1.0 - p)) * sums
        value = scores.mean(axis=1)
        covariance = np.cov(scores) / treated.size
    if row.method != "dq_mixed":
        return float(value[0])
    (of_w, both), (_, of_q) = covariance
    alpha = (of_q - both) / (of_w + of_q - 2.0 * both)
    return float(alpha * value[0] + (1.0 - alpha) * value[1])


def estimate(log: qdq.TaskLog, row: Any) -> float:
    """The estimate that a row is of; NaN if an arm has less than two periods."""
    kept = np.ones(log.n_tasks, np.bool_)
    if isinstance(log.design, qdq.Bernoulli) and row.method != "naive":
        return dq(log, row)
    if isinstance(log.design, qdq.Switchback):
        period = np.floor(log.arrival / log.design.period)
        washout = getattr(row, "washout", 0.0)
        kept = period < period[-1]
        if washout > 0.0:
            kept &= log.arrival - period * log.design.period >= washout
        if min(np.unique(period[kept & (log.treated == arm)]).size for arm in (False, True)) < 2:
            return math.nan
    response = log.departure - log.arrival
    return float(response[kept & log.treated].mean() - response[kept & ~log.treated].mean())


# --------------------------------------------------------------------------------------------------
# Pages
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Future, Path]]]:
    """All pages, run by the book's runner, two at a time while tests go on."""
    folder = tmp_path_factory.mktemp("pages")
    started = {}
    pool = ProcessPoolExecutor(2, get_context("spawn"), initializer=runner.die_with_parent)
    for page in PAGES:
        path, result = Path("book", "scenarios", f"{page}.ipynb"), folder / f"{page}.ipynb"
        run = pool.submit(runner.run_page, PROJECT, path, SMOKE.get(page, {}), result)
        started[page] = run, result
    yield started
    pool.shutdown(cancel_futures=True)


def first_cells(page: str, values: dict[str, Any]) -> dict[str, Any]:
    """Run a page's cells, with these parameters, until there are scenarios."""
    names: dict[str, Any] = {"__name__": "__main__"}
    (path,) = (PROJECT / "book").rglob(f"{page}.ipynb")
    notebook = nbformat.read(path, as_version=4)
    with mpl.rc_context():
        for cell in notebook.cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, f"{page}.ipynb", "exec"), names)
                if "parameters" in cell.metadata.get("tags", ()):
                    names |= values
                if "scenarios" in names:
                    return names
    raise AssertionError(f"{page} has no scenarios")


def scenarios_by_columns(
    names: dict[str, Any], page: str, results: pd.DataFrame
) -> tuple[list[str], dict[tuple[Any, ...], qdq.Scenario]]:
    """The scenarios of a page, and which columns of the table hold their coordinates."""
    scenarios = names["scenarios"]
    if page in scenarios:  # where there are several dictionaries of them
        scenarios = scenarios[page]
    scenarios = {k if isinstance(k, tuple) else (k,): s for k, s in scenarios.items()}
    columns = []
    for place, part in enumerate(zip(*scenarios, strict=True)):
        same = [name for name in results if set(results[name].dropna()) == set(part)]
        assert same, f"no column of results holds coordinate {place} of scenarios: {set(part)}"
        columns.append(same[0])
    return columns, scenarios


def test_every_page_is_in_the_book_and_has_quick_values():
    pages = runner.read_pages(PROJECT)
    for page in PAGES:
        assert pages[page].path == Path("book", "scenarios", f"{page}.ipynb")
    given = runner.choose_values(pages, PROJECT, "smoke", [])
    assert all(given[page] for page in PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_row_of_each_method_from_the_definitions(page, runs, monkeypatch):
    run, result = runs[page]
    assert run.result() == ""
    tables = published(result)
    assert {f"{page}.results", f"{page}.quantities"} <= set(tables)
    results = tables[f"{page}.results"]
    monkeypatch.chdir(PROJECT / "book" / "scenarios")
    names = first_cells(page, SMOKE[page])
    columns, scenarios = scenarios_by_columns(names, page, results)
    draw = np.random.default_rng(zlib.crc32(page.encode()))
    kinds = results[results["sd"].notna()].groupby(["method", "arrival_rate"], dropna=False)
    for (method, _), part in kinds:
        row = next(part.iloc[[draw.integers(len(part))]].itertuples(index=False))
        scenario = scenarios[tuple(getattr(row, name) for name in columns)]
        design = eval(row.design, {name: getattr(qdq, name) for name in qdq.__all__})

        def one(j: int, scenario: qdq.Scenario, design: Any, row: Any = row) -> float:
            seed = names["seed"], j
            log = qdq.simulate(scenario, design, int(row.n_tasks), seed, record=["service_time"])
            return estimate(log, row)

        values: list[float] = []
        for j in itertools.count():
            if len(values) == row.n_replications:  # of those that give an estimate
                break
            value = one(j, scenario, design)
            values += [value] if math.isfinite(value) else []
        mean, sd = np.mean(values), np.std(values, ddof=1)
        expected = {"mean": mean, "sd": sd}
        if not pd.isna(row.gte):
            expected |= {"rmse": math.sqrt(np.mean((np.array(values) - row.gte) ** 2))}
            if pairs := int(getattr(row, "n_mirrored", 0)):
                other = scenario.replace(control=scenario.treatment, treatment=scenario.control)
                swapped = qdq.Bernoulli(1.0 - design.propensity)
                mirrored = np.array([one(j, other, swapped) for j in range(pairs)])
                mean = np.mean(np.array(values[:pairs]) - mirrored) / 2.0
            expected |= {"bias": mean - row.gte}
        for name, value in expected.items():
            # A mean or bias near zero is known to rounding in what it is the difference of.
            tolerance = {"rel": 1e-9, "abs": 1e-9 * sd}
            assert getattr(row, name) == pytest.approx(value, **tolerance), (name, method, row)
