"""Tables that are kept under book/results: made by this source, and made again in part."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest

from qdq import publish
from qdq.publish import Kept

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "book" / "results"
SETS = ("standard", "paper")
KEPT = {
    (chosen, page): kept for chosen in SETS for page, kept in publish.kept(RESULTS / chosen).items()
}


def notebook_of(page: str) -> Path:
    (path,) = (ROOT / "book").rglob(f"{page}.ipynb")
    return path


@pytest.mark.parametrize(("chosen", "page"), KEPT, ids="-".join)
def test_what_is_kept_was_made_by_this_source(chosen: str, page: str) -> None:
    stamp = KEPT[chosen, page].stamp
    now = publish.stamp(notebook_of(page), stamp["parameters"])
    stale = [name for name in ("numbers", "cells") if stamp[name] != now[name]]
    assert not stale, f"make it anew: make results SET={chosen} BOOK='--only {page}'"
    text = json.dumps(stamp)
    assert set(stamp) == {"parameters", "numbers", "cells"}
    assert "/" not in text


@pytest.mark.parametrize(("chosen", "page"), KEPT, ids="-".join)
def test_what_is_kept_has_the_parameters_of_its_set(chosen: str, page: str) -> None:
    import build

    pages = build.read_pages(ROOT)
    values = build.choose_values(pages, ROOT, chosen, [])[page]
    wanted = {name: p.default for name, p in pages[page].parameters.items()} | values
    wanted.pop("n_jobs", None)
    assert KEPT[chosen, page].stamp["parameters"] == wanted


def first_cells(page: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Run the imports, the parameters and the first computing cell of a page."""
    space: dict[str, Any] = {}
    computed = False
    for cell in nbformat.read(notebook_of(page), as_version=4).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and not computed:
            exec(compile(ast.parse(cell.source), page, "exec"), space)
            if "parameters" in tags:
                space |= parameters
            computed = "compute" in tags
    return space


GRIDS = [(chosen, page) for chosen, page in KEPT if page not in ("haproxy", "speed")]


@pytest.mark.long
@pytest.mark.parametrize(("chosen", "page"), GRIDS, ids="-".join)
def test_a_row_that_is_kept_comes_out_again_at_reduced_size(
    chosen: str, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer replications, from the same seed: the mean within 5 of its standard errors."""
    from qdq import Bernoulli, ServerSplit, Switchback, run_study
    from qdq.grid import VARIANT

    kept: Kept = KEPT[chosen, page]
    monkeypatch.chdir(notebook_of(page).parent)
    space = first_cells(page, kept.stamp["parameters"])
    scenarios = space["scenarios"]
    results = kept.tables["results"]
    rows = results[(results["n_tasks"] <= 1_000_000) & results["sd"].notna()]
    row = rows.iloc[np.random.default_rng(sum(map(ord, chosen + page))).integers(len(rows))]
    # The coordinates are the columns before the design.
    names = list(results.columns[: list(results.columns).index("design")])
    cell = next(
        key
        for key in scenarios
        if all(
            part in tuple(row[name] for name in names)
            for part in (key if isinstance(key, tuple) else (key,))
        )
    )
    design = eval(
        row["design"],
        {"Bernoulli": Bernoulli, "Switchback": Switchback, "ServerSplit": ServerSplit},
    )
    variant = {name: row[name] for name in VARIANT if pd.notna(row[name])}
    if "horizon" in variant:
        variant["horizon"] = int(variant["horizon"])
    if "arrival_rate" in variant and variant["arrival_rate"] not in (
        "estimated",
        "window",
        "scenario",
    ):
        variant["arrival_rate"] = float(variant["arrival_rate"])
    washout = float(row["washout"]) if "washout" in results and pd.notna(row["washout"]) else 0.0
    study = run_study(
        scenarios[cell],
        int(row["n_tasks"]),
        8,
        kept.stamp["parameters"]["seed"],
        designs=design,
        truth=0.0,
        washout=washout,
        **variant,
    )
    found = study.table[study.table["method"] == row["method"]].iloc[0]
    error = row["sd"] / np.sqrt(8.0)
    assert abs(found["mean"] - row["mean"]) < 5.0 * error
