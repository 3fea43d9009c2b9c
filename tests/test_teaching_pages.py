"""A number of each teaching page, computed a second time with numpy from the definitions.

The pages run in this process with the values of book/params/smoke.yml.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from statistics import NormalDist
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import yaml

import qdq
from qdq import publish

PROJECT = Path(__file__).resolve().parents[1]
SMOKE = yaml.safe_load((PROJECT / "book" / "params" / "smoke.yml").read_text("utf-8"))


def code_cells(page: str) -> list[Any]:
    notebook = nbformat.read(PROJECT / "book" / f"{page}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run all cells of a page, and return its names."""
    monkeypatch.chdir(PROJECT / "book")
    names: dict[str, Any] = {"__name__": "__main__"}
    with mpl.rc_context({"backend": "agg"}):
        for cell in code_cells(page):
            exec(compile(cell.source, f"{page}.ipynb", "exec"), names)
            if "parameters" in cell.metadata.get("tags", ()):
                names |= SMOKE[page]
            plt.close("all")
    return names


def running_example(load: float) -> qdq.Scenario:
    return qdq.Scenario(
        n_servers=20,
        arrivals=qdq.Poisson(load),
        control=qdq.PowerOfD(1),
        treatment=qdq.PowerOfD(2),
    )


def time_integral(log: qdq.TaskLog, start: float, end: float) -> float:
    """Integral of the number in system over [start, end], from the jumps alone."""
    came = np.concatenate((log.carried_over[:, 0] * 0.0, log.arrival))
    left = np.concatenate((log.carried_over[:, 2], log.departure))
    times = np.concatenate((came, left))
    jumps = np.repeat([1.0, -1.0], came.size)
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(jumps[order])
    edges = np.clip(np.append(times, end), start, end)
    return float(level @ np.diff(edges))


@pytest.mark.long
def test_the_first_page_counts_its_two_effects_as_defined(monkeypatch):
    names = run("index", monkeypatch)
    scenario = running_example(0.7)
    seen, effect = [], []
    for j in range(names["n_runs"]):
        half, none, full = (
            qdq.simulate(scenario, design, names["n_tasks"], (1, j))
            for design in (qdq.Bernoulli(0.5), qdq.AllControl(), qdq.AllTreatment())
        )
        responses = half.departure - half.arrival
        by_arm = np.bincount(half.treated, responses) / np.bincount(half.treated)
        seen.append(by_arm[1] - by_arm[0])
        effect.append(
            np.mean(full.departure - full.arrival) - np.mean(none.departure - none.arrival)
        )
    assert names["seen"] == pytest.approx(seen, rel=1e-12)
    assert names["effect"] == pytest.approx(effect, rel=1e-12)
    # Random routing is twenty queues M/M/1.
    control = names["means"][:, 0, 0]
    error = control.std(ddof=1) / math.sqrt(control.size)
    assert abs(control.mean() - 1.0 / (1.0 - 0.7)) < 6.0 * error < 0.2


def board(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[dict[str, str], str]:
    """The verdicts of the first page from what is kept in a folder, and its sentence on them."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    imports, *cells = code_cells("index")
    lines = [line for line in imports.source.splitlines() if "import" in line]
    exec("\n".join(lines), names)
    for cell in cells:
        if "rules" in cell.source or "verdicts" in cell.source:
            exec(cell.source, names)
    return {claim: status for claim, (_, status) in names["verdicts"].items()}, names["text"]


def verdict_on_littles_law(pages: list[str]) -> str:
    """Whether both readings of the effect agree within 2 %, by the rules of claims.yml."""
    within, error = [], []
    for page in pages:
        rows = publish.run_of(page).tables["quantities"]
        gaps = rows[rows["quantity"] == "gap"].astype({"gte": float, "gte_error": float})
        size = gaps["gte"].abs()
        clear = (size >= 0.02 * gaps["control"]) & (size >= 6.0 * gaps["gte_error"])
        within += list(0.02 - gaps.loc[clear, "value"].abs())
        error += list(gaps.loc[clear, "error"])
    critical = NormalDist().inv_cdf(1.0 - 0.001 / len(error) / 2.0)
    sides = np.array(within) / np.array(error)
    holds, fails = int((sides > critical).sum()), int((sides < -critical).sum())
    if holds + fails < 0.5 * len(error):
        return "not settled"
    if holds >= 0.95 * (holds + fails):
        return "reproduced"
    return "not reproduced" if holds <= 0.05 * (holds + fails) else "reproduced when …"


def test_the_first_page_says_what_is_not_kept(monkeypatch, tmp_path):
    (tmp_path / "results").mkdir()
    shutil.copy(PROJECT / "book" / "claims.yml", tmp_path)
    rules = yaml.safe_load((tmp_path / "claims.yml").read_text("utf-8"))["claims"]
    found, text = board(monkeypatch, tmp_path)
    assert found == {claim: rule.get("status", "so far not kept") for claim, rule in rules.items()}
    assert "Results of these pages are so far not kept: delay, deterministic," in text

    kept = PROJECT / "book" / "results" / "standard"
    shutil.copytree(kept, tmp_path / "results" / "standard")
    whole, text = board(monkeypatch, tmp_path)
    assert "so far not kept" not in {*whole.values(), text}
    assert whole["C9"] == verdict_on_littles_law(rules["C9"]["pages"])

    for path in (tmp_path / "results" / "standard").glob("mixing.*"):
        path.unlink()
    found, text = board(monkeypatch, tmp_path)
    assert {claim for claim in found if found[claim] != whole[claim]} >= {"C10", "C13"}
    assert found["C10"] == found["C13"] == "so far not kept"
    assert text.endswith("Results of these pages are so far not kept: mixing.")


@pytest.mark.long
def test_why_integrates_the_gap_of_each_decision(monkeypatch):
    names = run("why", monkeypatch)
    areas = names["cost"]["all"]
    assert areas.size == SMOKE["why"]["n_decisions"]
    # One decision at a time, and its gap as an integral over time.
    scenario, n = running_example(0.7), names["spacing"]
    log = qdq.simulate(scenario, qdq.Bernoulli(0.5), areas.size * n, (1, 1_000))
    for k in (0, 7, 50):
        treated = log.treated.copy()
        treated[k * n] = not treated[k * n]
        other = qdq.replay(scenario, log, treated)
        start, end = log.arrival[k * n], log.arrival[(k + 1) * n - 1]
        gap = time_integral(log, start, end) - time_integral(other, start, end)
        sign = 1.0 if log.treated[k * n] else -1.0
        assert areas[k] == pytest.approx(sign * gap, abs=1e-5)
    whole = names["cost"]["own"] + names["cost"]["treated"] + names["cost"]["control"]
    assert areas == pytest.approx(whole, abs=1e-9)


@pytest.mark.long
def test_repair_adds_up_what_the_definition_says(monkeypatch):
    names = run("repair", monkeypatch)
    n, horizon = SMOKE["repair"]["n_tasks"], names["full"]
    assert horizon == 30 * 14
    log = qdq.simulate(running_example(0.7), qdq.Bernoulli(0.5), n, 1)
    gone = np.sort(np.concatenate((log.departure, log.carried_over[:, 2])))
    found = np.arange(n) + len(log.carried_over) - np.searchsorted(gone, log.arrival, "right")
    rate = (n - 1) / (log.arrival[-1] - log.arrival[0])
    windows = np.lib.stride_tricks.sliding_window_view
    response = windows(log.departure - log.arrival, horizon)[: n - horizon].sum(axis=1)
    queue = windows(found / rate, horizon)[1:].sum(axis=1)
    treated = log.treated[: n - horizon]
    expected = [s[treated].mean() - s[~treated].mean() for s in (response, queue)]
    assert names["by_hand"] == pytest.approx(expected, rel=1e-9)
    # The slope and the exact chains of the last section.
    assert names["slope_part"] > names["naive_part"]
    assert np.all(np.diff(names["slope_part"]) < 0)
