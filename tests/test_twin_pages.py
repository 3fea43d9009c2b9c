"""The pages on the log twin, what to log and the contest: what makes their logs, and a number each.

The systems that the twin misfits are made in cells of the page. With no misfit they are those of
`qdq.simulate`; with one they are held against plain Python, or against a closed form.
"""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import qdq
from test_pages import dq
from test_teaching_pages import SMOKE, code_cells, run

Z = 4.5  # standard errors: a false alarm of 7e-6
DRAWN = ["slower when busy", "faster when busy", "drifting rates", "correlated services"]
DRAWN += ["affinity", "clients that wait", "lost lines", "clock error", "hidden traffic"]


def plain(arrival, service, candidates, d, n_servers, slope=0.0, swing=0.0, cycle=1.0):
    """Serve tasks first come, first served, in plain Python; the shortest of d candidates."""
    there = [deque() for _ in range(n_servers)]
    departure, server = [], []
    for now, need, offered, count in zip(arrival, service, candidates, d, strict=True):
        offered = [int(s) for s in offered[:count]]
        for s in offered:
            while there[s] and there[s][0] <= now:
                there[s].popleft()
        best = min(offered, key=lambda s: len(there[s]))  # the first of equals
        factor = 1.0 + slope * min(len(there[best]), 3)
        factor *= 1.0 + swing * math.sin(2.0 * math.pi * (now / cycle + best / n_servers))
        there[best].append(max([now, *list(there[best])[-1:]]) + need * factor)
        departure.append(there[best][-1])
        server.append(best)
    return np.array(departure), np.array(server)


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """What makes the logs of the page on the twin."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells("log_twin"):
        if cell.id in ("imports", "parameters", "check", "generators"):
            exec(compile(cell.source, f"log_twin, {cell.id}", "exec"), names)
    return names


def drawn(made: dict[str, Any], j: int, count: int) -> qdq.TaskLog:
    record = ("candidates", "service_time")
    return qdq.simulate(
        made["base"], qdq.Bernoulli(0.5), count, (made["seed"], j), warm_up=0.0, record=record
    )


@pytest.mark.parametrize("misfit", DRAWN)
def test_without_strength_a_misfit_is_the_simulators_log(made, misfit):
    assert misfit in made["MISFITS"]
    log, other = made["world"](misfit, 0.0, 3, 20_000), drawn(made, 3, 20_000)
    for name in ("arrival", "departure", "treated", "server"):
        np.testing.assert_allclose(getattr(log, name), getattr(other, name), rtol=1e-12)
    # And with one it is not.
    strong = made["world"](misfit, 0.1, 3, 20_000)
    assert strong.n_tasks < 20_000 or np.any(strong.departure != log.departure)


@pytest.mark.parametrize(
    ("misfit", "changes"),
    [
        ("slower when busy", {"slope": 0.1}),
        ("faster when busy", {"slope": -0.1}),
        ("drifting rates", {"swing": 0.1}),
    ],
)
def test_services_that_queues_or_time_change(made, misfit, changes):
    log, tasks = made["world"](misfit, 0.1, 4, 5_000), drawn(made, 4, 5_000)
    d = np.where(tasks.treated, made["pair"][1], made["pair"][0])
    cycle = made["n_tasks"] / (20 * made["load"]) / 2.0
    departure, server = plain(
        tasks.arrival, tasks.service_time, tasks.candidates, d, 20, cycle=cycle, **changes
    )
    np.testing.assert_allclose(log.departure, departure, rtol=1e-12)
    np.testing.assert_array_equal(log.server, server)


def test_what_is_done_to_the_lines_of_a_log(made):
    whole = made["world"]("none", 0.0, 5, 40_000)
    late = made["world"]("clock error", 0.2, 5, 40_000)
    lead = late.departure - whole.departure
    for server in range(20):
        assert np.ptp(lead[whole.server == server]) < 1e-9
    assert 0.0 <= lead.min() < lead.max() <= 0.2
    for misfit in ("lost lines", "hidden traffic"):
        part = made["world"](misfit, 0.1, 5, 40_000)
        place = np.searchsorted(whole.arrival, part.arrival)
        np.testing.assert_array_equal(whole.departure[place], part.departure)
        missing = whole.n_tasks - part.n_tasks
        assert abs(missing - 4_000) < Z * math.sqrt(40_000 * 0.1 * 0.9)


def test_affinity_and_correlated_services_are_as_strong_as_they_say(made):
    tasks = drawn(made, 6, 40_000)
    sticky = made["world"]("affinity", 0.3, 6, 40_000, arm=False)  # control follows candidate 0
    home = np.mean(sticky.server != tasks.candidates[:, 0])
    assert abs(home - 0.3 * 0.95) < 0.02  # one home in twenty is the candidate; users are uneven
    uneven = made["world"]("correlated services", 0.3, 6, 40_000)
    first = uneven.departure[:200] - uneven.arrival[:200]
    alone = np.abs(tasks.response_time[:200] - tasks.service_time[:200]) < 1e-12
    ratio = (first / tasks.service_time[:200])[alone][:20]
    assert np.all(np.isclose(ratio, 1.3) | np.isclose(ratio, 0.7))


def test_clients_that_wait_are_those_of_machine_repair(made):
    """One server, exponential service of mean 1, K clients who think for a mean time T.

    The number at the server has probabilities proportional to K!/(K - k)! T**-k, so that the
    throughput X is that it is busy, and by Little's law a task takes K/X - T.
    """
    clients, mean_think, n = 8, 6.0, 200_000
    rng = np.random.default_rng(9)
    service, think = rng.exponential(size=n), mean_think * rng.exponential(size=n)
    came, departure, _ = made["serve"](
        np.empty(n),
        service,
        np.zeros((n, 1), np.int32),
        np.ones(n, np.int64),
        0.0,
        0.0,
        1.0,
        think,
        clients,
        1,
    )
    weights = np.cumprod([1.0, *((clients - k) / mean_think for k in range(clients))])
    throughput = 1.0 - weights[0] / weights.sum()
    expected = clients / throughput - mean_think
    means = (departure - came)[1_000:].reshape(-1, 1_990).mean(axis=1)
    error = means.std(ddof=1) / math.sqrt(means.size)
    assert abs(means.mean() - expected) < Z * error < 0.05 * expected


@pytest.mark.long
def test_the_twins_page_has_the_effect_of_a_misfit(monkeypatch):
    names = run("log_twin", monkeypatch)
    results = names["results"].set_index(["misfit", "strength", "logged"])
    given = SMOKE["log_twin"]
    n, effects = 3 * given["n_tasks"], []
    for j in range(given["n_truths"]):
        tasks = drawn(names, 1_000 + j, n)
        means = [
            np.mean((departure - tasks.arrival)[given["n_tasks"] // 10 :])
            for d in names["pair"]
            for departure, _ in [
                plain(
                    tasks.arrival,
                    tasks.service_time,
                    tasks.candidates,
                    np.full(n, d),
                    20,
                    slope=0.03,
                )
            ]
        ]
        effects.append(means[1] - means[0])
    row = results.loc["slower when busy", 0.03, ""]
    assert row["effect"] == pytest.approx(np.mean(effects), rel=1e-9)
    # What the twin says of the first log, whose making is tested above.
    values = [
        qdq.log_twin(
            names["world"]("slower when busy", 0.03, j, given["n_tasks"]),
            *(qdq.PowerOfD(d) for d in names["pair"]),
            20,
            seed=(names["seed"], j),
        )
        for j in range(given["n_logs"])
    ]
    off = [one.twin_value / row["effect"] - 1.0 for one in values]
    assert row["twin_error"] == pytest.approx(np.mean(off), rel=1e-9)
    assert row["flagged"] == np.mean([not one.trusted for one in values])
    # A control that cannot stand alone has no effect, and every log says so.
    assert results.loc["unstable control", 0.05, ""]["flagged"] == 1.0


@pytest.mark.long
def test_the_ladder_weighs_columns_against_mixed_dq(monkeypatch):
    names = run("what_to_log", monkeypatch)
    given = SMOKE["what_to_log"]
    system = given["systems"][0]
    scenario, truth = names["scenarios"][system], names["truths"][system].value
    row = SimpleNamespace(method="dq_mixed", horizon=scenario.default_horizon, queue="in_system")
    row.arrival_rate, row.normalise = "estimated", "group_means"
    squares = []
    for j in range(given["n_logs"]):
        log = qdq.simulate(scenario, qdq.Bernoulli(0.5), given["n_tasks"], (names["seed"], j))
        response = log.departure - log.arrival
        naive = response[log.treated].mean() - response[~log.treated].mean()
        squares.append([(naive - truth) ** 2, (dq(log, row) - truth) ** 2])
    naive, mixed = np.mean(squares, axis=0)
    results = names["results"].set_index(["system", "rung"])
    found = results.loc[(system, "naive")]
    assert found["rmse"] == pytest.approx(math.sqrt(naive), rel=1e-9)
    assert found["worth"] == pytest.approx(mixed / naive, rel=1e-6)
    assert results.loc[(system, "mixed"), "worth"] == 1.0


@pytest.mark.long
def test_the_contest_has_the_switchbacks_error(monkeypatch):
    names = run("contest", monkeypatch)
    given = SMOKE["contest"]
    system = given["systems"][1]
    scenario, truth = names["scenarios"][system], names["truths"][system].value

    def switched(period: float, seed: int, j: int) -> float:
        design = qdq.Switchback(period)
        log = qdq.simulate(scenario, design, given["n_tasks"], (seed, j))
        place = np.floor(log.arrival / period)
        whole = place < place[-1]
        response = log.departure - log.arrival
        return response[whole & log.treated].mean() - response[whole & ~log.treated].mean()

    errors = {
        period: np.mean(
            [
                (switched(period, names["choice_seed"], j) - truth) ** 2
                for j in range(given["n_choices"])
            ]
        )
        for period in given["periods"]
    }
    best = min(errors, key=errors.get)
    row = names["results"].set_index(["system", "method"]).loc[(system, "switchback")]
    assert row["period"] == best
    squares = [(switched(best, names["seed"], j) - truth) ** 2 for j in range(given["n_logs"])]
    assert row["rmse"] == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-9)
