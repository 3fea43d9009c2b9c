"""Tables that are kept under book/results: made by this source, and made again in part."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import build
import qdq
from qdq import publish
from qdq.estimators import RATES
from qdq.grid import VARIANT
from test_pages import first_cells, scenarios_by_columns

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "book" / "results"
SETS = ("standard", "paper")
FEW = 8  # replications that are run again
KEPT = {
    (chosen, page): kept for chosen in SETS for page, kept in publish.kept(RESULTS / chosen).items()
}


def notebook_of(page: str) -> Path:
    (path,) = (ROOT / "book").rglob(f"{page}.ipynb")
    return path


@pytest.mark.parametrize(("chosen", "page"), KEPT, ids=["-".join(key) for key in KEPT])
def test_what_is_kept_was_made_by_this_source(chosen: str, page: str) -> None:
    stamp = KEPT[chosen, page].stamp
    assert not KEPT[chosen, page].stale(notebook_of(page)), (
        f"make it anew: make results SET={chosen} BOOK='--only {page}', or, if no number has "
        "changed, say so: python book/build.py --verify --confirm"
    )
    text = json.dumps(stamp)
    assert set(stamp) - {"confirmed"} == {"parameters", "numbers", "cells"}
    assert '"/' not in text  # a path
    assert "//" not in text  # an address


@pytest.mark.parametrize(("chosen", "page"), KEPT, ids=["-".join(key) for key in KEPT])
def test_what_is_kept_has_the_parameters_of_its_set(chosen: str, page: str) -> None:
    pages = build.read_pages(ROOT)
    values = build.choose_values(pages, ROOT, chosen, [])[page]
    wanted = {name: p.default for name, p in pages[page].parameters.items()} | values
    wanted.pop("n_jobs", None)
    assert KEPT[chosen, page].stamp["parameters"] == wanted


# Pages whose table says of which design and method a row is.
GRIDS = [key for key, kept in KEPT.items() if "design" in kept.tables.get("results", ())]


@pytest.mark.long
@pytest.mark.parametrize(("chosen", "page"), GRIDS, ids=["-".join(key) for key in GRIDS])
def test_a_row_that_is_kept_comes_out_again_at_reduced_size(
    chosen: str, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replications of a row drawn by the page's name: their mean is near that of all.

    They are among those that the mean is of, so the tolerance of 5 standard errors is wide.
    """
    kept = KEPT[chosen, page]
    parameters = kept.stamp["parameters"]
    monkeypatch.chdir(notebook_of(page).parent)
    results = kept.tables["results"]
    names = first_cells(page, parameters)
    columns, scenarios = scenarios_by_columns(names, page, results)
    rows = results[(results["n_tasks"] <= 1_000_000) & (results["n_replications"] > 20)]
    if "rule" in rows:  # what a rule chose is not in the row
        rows = rows[rows["rule"].isna()]
    draw = np.random.default_rng(zlib.crc32(f"{chosen} {page}".encode()))
    row = rows.iloc[draw.integers(len(rows))]
    variant = {name: row[name] for name in VARIANT if pd.notna(row[name])}
    if "horizon" in variant:
        variant["horizon"] = int(variant["horizon"])
    if variant.get("arrival_rate", "estimated") not in RATES:
        variant["arrival_rate"] = float(variant["arrival_rate"])
    washout = row.get("washout")
    study = qdq.run_study(
        scenarios[tuple(row[name] for name in columns)],
        int(row["n_tasks"]),
        FEW,
        parameters["seed"],
        designs=eval(row["design"], {name: getattr(qdq, name) for name in qdq.__all__}),
        truth=0.0,
        washout=0.0 if washout is None or pd.isna(washout) else float(washout),
        **variant,
    )
    # Tables of pages that have names of their own for a method are of its design.
    table = study.table.set_index("method")
    method = row["method"] if row["method"] in table.index else table.index[0]
    assert abs(table.at[method, "mean"] - row["mean"]) < 5.0 * row["sd"] / math.sqrt(FEW)
