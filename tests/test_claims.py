"""Verdicts: thresholds, comparisons, conditions, and what is said of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from scipy.stats import norm

from qdq import claims, figures, grid, publish

ROOT = Path(__file__).resolve().parents[1]

RULES: dict[str, Any] = {
    "significance": 0.001,
    "most": 0.9,
    "few": 0.1,
    "decided": 0.5,
    "clear_effect": {"smallest": 0.02, "errors": 6},
    "main": {"normalise": "group_means", "queue": "in_system"},
    "claims": {
        "C1": {
            "says": "The naive estimator understates.",
            "reading": "It finds less than nine tenths.",
            "pages": ["one", "two"],
            "clear_effect": True,
            "parts": [{"quantity": "share_found", "method": "naive", "between": [None, 0.9]}],
        },
        "C2": {
            "says": "2 to 5 times.",
            "reading": "Both.",
            "pages": ["one"],
            "variants": True,
            "parts": [
                {"quantity": "sd_ratio", "method": "a", "against": "c", "between": [2, 5]},
                {"quantity": "sd_ratio", "method": "b", "against": "c", "between": [2, 5]},
            ],
        },
        "C3": {"says": "Networks.", "status": "not tested here"},
        "C4": {
            "says": "Periodic only.",
            "reading": "",
            "pages": ["one"],
            "where": {"arrivals": "periodic", "share": [None, 0.5]},
            "parts": [{"quantity": "gap", "between": [-0.1, 0.1]}],
        },
    },
}


def row(quantity: str, value: float, error: float = 0.01, **more: Any) -> dict[str, Any]:
    base = {"quantity": quantity, "method": "naive", "against": "", "value": value, "error": error}
    base |= {"n_tasks": 1000, "gte": -1.0, "gte_error": 0.001, "control": 5.0, "load": 0.5}
    return base | more


def shares(*values: float, **more: Any) -> pd.DataFrame:
    rows = [row("share_found", value, load=0.1 * k, **more) for k, value in enumerate(values)]
    return pd.DataFrame(rows)


def weigh(claim: str, **pages: pd.DataFrame) -> claims.Verdict:
    return claims.verdict(claim, pages, RULES)


def test_a_cell_is_settled_only_beyond_the_corrected_number_of_errors() -> None:
    critical = norm.isf(0.001 / 3 / 2)
    margin = 0.01 * critical
    found = weigh("C1", one=shares(0.9 - 1.01 * margin, 0.9 - 0.99 * margin, 0.9 + 1.01 * margin))
    assert found.critical == pytest.approx(critical)
    assert list(found.cells["outcome"]) == ["holds", "open", "fails"]
    assert found.counts == {"holds": 1, "open": 1, "fails": 1}


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ([0.5] * 10, claims.REPRODUCED),
        ([0.5] * 9 + [1.5], claims.REPRODUCED),
        ([0.5] * 8 + [1.5] * 2, claims.SOMETIMES),
        ([1.5] * 8 + [0.5] * 2, claims.SOMETIMES),
        ([1.5] * 9 + [0.5], claims.NOT_REPRODUCED),
        ([0.5] * 5 + [0.9] * 5, claims.REPRODUCED),
        ([0.5] * 4 + [0.9] * 6, claims.NOT_SETTLED),
    ],
)
def test_the_status_follows_from_the_counts(values: list[float], status: str) -> None:
    assert weigh("C1", one=shares(*values)).status == status


def test_pages_that_are_not_there_and_given_statuses_are_not_weighed() -> None:
    assert weigh("C1").status == claims.NOT_TESTED
    assert weigh("C3", one=shares(0.5)).status == "not tested here"
    assert weigh("C1", two=shares(0.5), three=shares(1.5)).pages == ["two"]
    with pytest.raises(ValueError, match="claim='C9' is not one of C1, C2, C3, C4"):
        weigh("C9", one=shares(0.5))


def test_effects_that_are_small_or_unknown_are_left_out_where_the_claim_is_about_them() -> None:
    frame = pd.concat(
        [
            shares(0.5),
            shares(1.5, gte=-0.09, region="small"),
            shares(1.5, gte_error=0.2, region="unknown"),
        ]
    )
    found = weigh("C1", one=frame)
    assert (found.status, found.left_out) == (claims.REPRODUCED, 2)
    assert "2 more have no clear effect and are left out" in found.counted()


def test_every_part_must_hold_and_a_variant_is_a_cell() -> None:
    rows = []
    for normalise, a, b in (("group_means", 3.0, 3.0), ("inverse_propensity", 3.0, 6.0)):
        for method, value in (("a", a), ("b", b)):
            rows.append(row("sd_ratio", value, method=method, against="c", normalise=normalise))
    found = weigh("C2", one=pd.DataFrame(rows))
    assert list(found.cells["outcome"]) == ["holds", "fails"]
    assert found.status == claims.SOMETIMES
    assert found.conditions() == ["one: normalisation group means"]


def test_only_the_main_variant_counts_unless_the_claim_asks_for_all() -> None:
    frame = pd.concat(
        [
            shares(0.5, normalise="group_means", queue="in_system", arrival_rate="scenario"),
            shares(1.5, normalise="group_means", queue="in_system", arrival_rate="estimated"),
            shares(1.5, normalise="group_means", queue="waiting", arrival_rate="scenario"),
            shares(1.5, normalise="inverse_propensity", queue="in_system", arrival_rate="scenario"),
        ]
    )
    assert weigh("C1", one=frame).counts == {"holds": 1}
    # Each cell has its own arrival rates: a constant rate has no "scenario" before it.
    of_variant = {"normalise": "group_means", "queue": "in_system"}
    constant = shares(0.6, arrivals="stationary", arrival_rate="estimated", **of_variant)
    frame = pd.concat([frame.assign(arrivals="periodic"), constant])
    assert weigh("C1", one=frame).counts == {"holds": 2}


def test_where_limits_the_cells() -> None:
    rows = [
        row("gap", 0.0, arrivals="periodic", share=0.5),
        row("gap", 9.0, arrivals="periodic", share=0.6),
        row("gap", 9.0, arrivals="stationary", share=0.1),
    ]
    assert weigh("C4", one=pd.DataFrame(rows)).counts == {"holds": 1}
    assert weigh("C4", one=pd.DataFrame([row("gap", 0.0)])).status == claims.NOT_TESTED


def test_conditions_are_sought_in_one_column_then_in_two_and_else_counted() -> None:
    def condition(outcomes: dict[tuple[float, str], str]) -> str:
        good, bad = 0.5, 1.5
        rows = [
            row("share_found", good if outcome == "holds" else bad, load=load, pair=pair)
            for (load, pair), outcome in outcomes.items()
        ]
        return weigh("C1", one=pd.DataFrame(rows)).conditions()[0]

    cells = [(load, pair) for load in (0.5, 0.7, 0.9) for pair in ("1 vs 2", "2 vs 3")]
    assert condition(dict.fromkeys(cells, "holds")) == "one: all cells that can be told"
    by_load = {cell: "holds" if cell[0] < 0.8 else "fails" for cell in cells}
    assert condition(by_load) == "one: load 0.5 or 0.7"
    both = dict.fromkeys(cells, "fails") | {(0.5, "1 vs 2"): "holds", (0.9, "2 vs 3"): "holds"}
    assert condition(both) == "one: load 0.5 with pair 1 vs 2, and load 0.9 with pair 2 vs 3"


def test_what_is_said_of_a_page_names_counts_and_numbers() -> None:
    text = claims.said("one", shares(0.5, 0.6, 1.5), RULES)
    basis, blank, first, second, *_ = text.splitlines()
    assert basis == (
        "For 1,000 tasks an experiment, and for DQ with group means and the queue read as tasks in "
        "system. Standard errors are in parentheses."
    )
    assert not blank
    assert first.startswith("- **C1.** *The naive estimator understates.*")
    assert "**It holds in 2 of 3 cells and fails in 1.**" in first
    assert "It holds where: load 0 or 0.1." in first
    numbers = "is 0.500 (0.010) to 1.500 (0.010), median 0.600 (0.010)."
    assert second == f"  - The share of the effect that naive finds {numbers}"
    assert "C3" not in text
    assert claims.said("none", shares(0.5), RULES) == ""
    variants = pd.concat([shares(0.5, normalise=n) for n in ("group_means", "inverse_propensity")])
    basis = claims.said("one", variants, RULES).splitlines()[0]
    assert "; C2 counts every variant that the page runs." in basis


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    values, errors = pd.Series([4.0, 1.0, 3.0, 2.0]), pd.Series([0.4, 0.1, 0.3, 0.1])
    assert claims.ranged(values, errors).endswith("median 2.50 (0.20)")
    assert claims.ranged(values[:3], errors[:3]).endswith("median 3.00 (0.30)")
    assert claims.ranged(values[:1], errors[:1]) == "4.00 (0.40)"
    assert claims.ranged(values[:2], errors[:2]).endswith("median 2.50 (0.25)")


def test_failures_on_either_side_of_a_range_are_told_apart() -> None:
    rows = []
    for load, a, b in ((0.1, 1.0, 1.0), (0.2, 1.0, 3.0), (0.3, 6.0, 3.0), (0.4, 6.0, 1.0)):
        for method, value in (("a", a), ("b", b)):
            rows.append(row("sd_ratio", value, method=method, against="c", load=load))
    found = weigh("C2", one=pd.DataFrame(rows))
    sides = "(2 below the range, 1 above it, 1 below by one part and above by another)"
    assert found.counted() == f"It holds in 0 of 4 cells and fails in 4 {sides}."
    first, second = found.figures()
    assert first.endswith("beyond doubt it is below 2 in 2 of 4 cells and above 5 in 2")
    assert second.endswith("beyond doubt it is below 2 in 2 of 4 cells and above 5 in 0")


def test_parts_with_cells_of_their_own_are_counted_apart_and_logs_are_said_as_ratios() -> None:
    parts = [
        {"quantity": "log_rmse_loss", "method": "dq_mixed", "between": [None, 0.223]},
        *(
            {"quantity": "bias_cut", "method": "dq_mixed", "against": x, "between": [0, None]}
            for x in ("dq_response", "dq_queue")
        ),
    ]
    claim = {"says": "Both.", "reading": "", "pages": ["one"], "parts": parts}
    rows = [
        row("log_rmse_loss", math.log(value), 0.001, method="dq_mixed", horizon_share=1.0, load=x)
        for x, value in ((0.1, 1.0), (0.2, 3.0))
    ]
    for share, value in ((0.1, -0.1), (0.2, -0.1), (0.5, 0.1)):
        of = {"method": "dq_mixed", "horizon_share": share, "load": 0.1}
        rows.append(row("bias_cut", value, against="dq_response", **of))
        rows.append(row("bias_cut", 0.1, against="dq_queue", **of))
    found = claims.verdict("C1", {"one": pd.DataFrame(rows)}, RULES | {"claims": {"C1": claim}})
    assert found.counted() == (
        "It holds in 2 of 5 cells and fails in 3. Its parts have cells of their own: that about "
        "RMSE holds in 1 of 2 cells and fails in 1; that about bias holds in 1 of 3 cells and "
        "fails in 2."
    )
    ratio = "is 1.0000 (0.0010) to 3.0000 (0.0030), median 2.0000 (0.0020)"
    assert next(found.figures()).endswith(ratio)
    assert found.conditions() == ["one: load 0.1 with horizon 1 or 0.5 of 30Nλ"]


def test_scoreboard_and_details_say_the_same_of_each_source() -> None:
    found = {
        source: {claim: claims.verdict(claim, {"one": frame}, RULES) for claim in RULES["claims"]}
        for source, frame in (("this build", shares(0.5)), ("long <runs>", shares(1.5)))
    }
    table = claims.scoreboard(found)
    assert table.count("<tr>") == 1 + len(RULES["claims"])
    assert "<th>long &lt;runs&gt;</th>" in table
    assert "<strong>reproduced</strong> (n = 1,000)" in table
    assert "<strong>not reproduced</strong> (n = 1,000)" in table
    text = claims.details(found, {"one": "scenarios/one.html"})
    for claim in RULES["claims"]:
        assert f'href="#claim-{claim.lower()}"' in table
        assert f'id="claim-{claim.lower()}"' in text
    assert '<a href="scenarios/one.html">one</a>' in text


def test_the_long_run_of_a_page_is_shown_with_its_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    assert claims.long_run("one", RULES) == "No long run of this page is kept."
    made = {"parameters": {"n_tasks": 7000, "load": 0.5}, "numbers": "0" * 64, "cells": "1" * 64}
    publish.keep("results/paper", "one", {"quantities": shares(0.5)}, made)
    text = claims.long_run("one", RULES)
    assert "Other than by default: `load` 0.5, `n_tasks` 7,000." in text
    assert "made by the source `000000000000` (another than this book)" in text
    assert "**C1.**" in text
    made["parameters"] = {"n_tasks": 7, "load": 0.5}
    publish.keep("results/standard", "one", {"quantities": shares(0.5)}, made)
    assert "Other than by default: `n_tasks` 7,000." in claims.long_run("one", RULES)


def test_in_short_says_shares_and_who_has_the_lowest_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    assert claims.in_short("one", RULES) == "No run of this page is kept."
    rows = []
    for load, naive, switchback in ((0.5, 3.0, 2.0), (0.7, 3.0, 4.0), (0.9, 0.5, 1.5)):
        rows.append(row("share_found", load, method="naive", load=load))
        rows.append(row("share_found", 1.0, method="dq_mixed", load=load))
        rows.append(row("sd_ratio", 10.0 * load, method="dq_mixed", against="naive", load=load))
        for against, value in (("naive", naive), ("switchback", switchback)):
            rows.append(row("rmse_ratio", value, method="dq_mixed", against=against, load=load))
    made = {"parameters": {}, "numbers": "", "cells": ""}
    publish.keep("results/standard", "one", {"quantities": pd.DataFrame(rows)}, made)
    text = claims.in_short("one", RULES)
    assert "1,000 tasks an experiment" in text
    shares = "naive finds 0.70 (0.50 to 0.90) of the effect and mixed DQ 1.00 (1.00 to 1.00)"
    assert shares in text
    assert "lowest for switchback in 2 of 3 cells, for naive in 1 and" in text
    assert "for mixed DQ in none" in text
    assert "of mixed DQ is 7 (5 to 9) times that of naive" in text


# The book's own rules.


@pytest.fixture(scope="module")
def rules() -> dict[str, Any]:
    return claims.read(ROOT / "book" / "claims.yml")


def test_the_rules_hold_all_claims_and_name_pages_and_quantities_that_exist(
    rules: dict[str, Any],
) -> None:
    assert list(rules["claims"]) == [f"C{k}" for k in range(1, 15)]
    toc = yaml.safe_dump(yaml.safe_load((ROOT / "_toc.yml").read_text()))
    compared = set(grid.COMPARISONS)
    for rule in rules["claims"].values():
        assert rule["says"]
        assert "status" in rule or rule["reading"]
        for page in rule.get("pages", ()):
            assert f"book/scenarios/{page}\n" in toc, page
        for part in rule.get("parts", ()):
            low, high = part["between"]
            assert (-math.inf if low is None else low) < (math.inf if high is None else high)
            if part.get("against", "fixed_alpha") != "fixed_alpha":
                assert (part["quantity"], part["method"], part["against"]) in compared
            assert part.get("method", "naive") in figures.METHODS


def test_a_file_of_the_book_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "book" / "scenarios")
    assert publish.find("claims.yml") == ROOT / "book" / "claims.yml"
    monkeypatch.chdir(ROOT)
    assert publish.find("claims.yml") == ROOT / "book" / "claims.yml"
    with pytest.raises(FileNotFoundError, match=r"nothing\.yml is not in this folder"):
        publish.find("nothing.yml")
