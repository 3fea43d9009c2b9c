"""Tables that pages publish: what comes back, from a notebook that ran and from files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest

from qdq import publish

# Numbers that lose a bit, a sign or their size in a careless format.
HARD = [0.1 + 0.2, 1.0 / 3.0, 5e-324, 1.7976931348623157e308, -0.0, 1e22]
PAGE = f"""\
import numpy as np
import pandas as pd
from qdq.publish import publish

table = pd.DataFrame({{
    "number": {HARD!r},
    "missing": [1.5, np.nan, None, np.nan, 2.5, 0.1],
    "horizon": pd.array([2**53 + 1, None, 3, 4, 5, 6], dtype="Int64"),
    "count": np.array([1, 2, 3, 4, 5, 2**62], dtype=np.int64),
    "sure": [True, False, True, True, False, False],
    "text": ["a", "", None, "λ", '"quoted"', "line\\nbreak"],
    "none": [None] * 6,
}})
publish("one", results=table, empty=table.iloc[:0])
publish("two", results=table[["text"]])
print("said")
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook that has run."""
    folder = tmp_path_factory.mktemp("page")
    new = nbformat.v4
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    page = new.new_notebook(cells=[new.new_code_cell(PAGE)], metadata={"kernelspec": kernel})
    page.cells[0].id = "c0"
    nbformat.write(page, folder / "source.ipynb")
    result = folder / "below" / "executed.ipynb"
    result.parent.mkdir()
    papermill.execute_notebook(folder / "source.ipynb", result, progress_bar=False, cwd=folder)
    return result


def test_tables_come_back_to_the_last_bit(notebook):
    tables = publish.published(notebook)
    assert list(tables) == ["one.results", "one.empty", "two.results"]
    found = tables["one.results"]
    assert found["number"].dtype == np.float64
    assert [x.hex() for x in found["number"]] == [x.hex() for x in HARD]
    assert found["missing"].dtype == np.float64
    np.testing.assert_array_equal(found["missing"], [1.5, np.nan, np.nan, np.nan, 2.5, 0.1])
    assert found["count"].tolist() == [1, 2, 3, 4, 5, 2**62]
    assert found["count"].dtype == np.int64
    assert found["sure"].tolist() == [True, False, True, True, False, False]
    assert found["sure"].dtype == np.bool_
    assert pd.isna(found["horizon"][1])
    assert found["horizon"].dropna().tolist()[1:] == [3, 4, 5, 6]
    text = ["a", "", None, "λ", '"quoted"', "line\nbreak"]
    assert [None if pd.isna(value) else value for value in found["text"]] == text
    assert found["none"].isna().all()
    assert list(tables["one.empty"].columns) == list(found.columns)
    assert len(tables["one.empty"]) == 0
    assert list(tables["two.results"].columns) == ["text"]


def test_nothing_of_it_is_shown(notebook):
    outputs = nbformat.read(notebook, as_version=4).cells[0].outputs
    shown = [output for output in outputs if output.output_type != "display_data"]
    assert [output.text for output in shown] == ["said\n"]
    hidden = [output for output in outputs if output.output_type == "display_data"]
    assert len(hidden) == 3
    for output in hidden:
        assert list(output.data) == ["application/papermill.record/application/json"]


def test_executed_notebooks_of_a_folder(notebook):
    found = publish.executed(notebook.parents[1])
    assert {page: list(tables) for page, tables in found.items()} == {
        "one": ["results", "empty"],
        "two": ["results"],
    }
    assert publish.published(notebook.parents[1] / "source.ipynb") == {}


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, 1j, b"bytes", np.datetime64("2026-01-01", "D"), pd.Timestamp(0)]
)
def test_other_things_are_refused(value):
    table = pd.DataFrame({"x": pd.Series([value], dtype=object)})
    with pytest.raises(TypeError, match="must hold numbers, strings, booleans or nothing"):
        publish.to_json(table)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, pd.NA])
def test_what_json_has_no_number_for_is_missing(value):
    table = pd.DataFrame({"x": pd.Series([1.0, value], dtype=object)})
    content = json.loads(json.dumps(publish.to_json(table), allow_nan=False))
    assert content == {"columns": ["x"], "rows": [[1.0], [None]]}
    np.testing.assert_array_equal(publish.from_json(content)["x"].astype(float), [1.0, np.nan])


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def test_kept_tables_come_back_with_their_stamp(notebook, tmp_path):
    tables = {
        name.split(".")[1]: table
        for name, table in publish.published(notebook).items()
        if name.startswith("one")
    }
    stamp = {"parameters": {"loads": [0.5], "n": 3}, "numbers": "abc"}
    publish.keep(tmp_path, "one", tables, stamp)
    publish.keep(tmp_path, "one_more", {"results": tables["results"]}, stamp | {"numbers": "d"})
    found = publish.kept(tmp_path)
    assert list(found) == ["one", "one_more"]
    assert found["one"].stamp == stamp
    assert found["one_more"].stamp["numbers"] == "d"
    assert set(found["one"].tables) == {"results", "empty"}
    back = found["one"].tables["results"]
    assert [x.hex() for x in back["number"]] == [x.hex() for x in HARD]
    agreed = publish.agreement("one.results", back, tables["results"])
    assert agreed.holds
    assert agreed.same == tables["results"].size
    # What a page no longer has goes, and only that.
    publish.keep(tmp_path, "one", {"results": tables["results"]}, stamp)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "one.results.parquet",
        "one_more.results.parquet",
    ]
    assert publish.kept(tmp_path / "nowhere") == {}


def test_what_is_kept_can_be_confirmed_for_later_source(notebook, tmp_path, monkeypatch):
    page = notebook.parents[1] / "source.ipynb"
    tables = {"results": publish.published(notebook)["two.results"]}
    publish.keep(tmp_path, "two", tables, publish.stamp(page, {"n": 3}))
    made = publish.numbers_hash()
    publish.confirm(tmp_path, "two", page)  # of this source as it is
    publish.confirm(tmp_path, "other", page)
    assert list(publish.kept(tmp_path)) == ["two"]
    assert "confirmed" not in publish.kept(tmp_path)["two"].stamp

    monkeypatch.setattr(publish, "numbers_hash", lambda: "later")
    assert publish.kept(tmp_path)["two"].stale(page) == ["numbers"]
    publish.confirm(tmp_path, "two", page)
    kept = publish.kept(tmp_path)["two"]
    assert kept.stamp == {**publish.stamp(page, {"n": 3}), "numbers": made, "confirmed": "later"}
    assert kept.stale(page) == []
    assert kept.tables["results"].equals(tables["results"])

    # Another source again, and then other cells, which nothing can confirm.
    monkeypatch.setattr(publish, "numbers_hash", lambda: "last")
    assert publish.kept(tmp_path)["two"].stale(page) == ["numbers"]
    content = nbformat.read(page, as_version=4)
    content.cells[0].metadata["tags"] = ["compute"]
    nbformat.write(content, tmp_path / "changed.ipynb")
    publish.confirm(tmp_path, "two", tmp_path / "changed.ipynb")
    assert publish.kept(tmp_path)["two"].stamp == kept.stamp
    assert kept.stale(tmp_path / "changed.ipynb") == ["numbers", "cells"]


EXPECTED = pd.DataFrame(
    {
        "method": ["naive", "dq_mixed", None],
        "value": [1.0, 2.0, None],
        "error": [0.1, 0.2, None],
        "n_tasks": [100, 100, 100],
    }
)


@pytest.mark.parametrize(
    ("change", "same", "near", "apart"),
    [
        ({}, 12, 0, 0),
        ({(0, "value"): 1.0 + 3.9 * math.hypot(0.1, 0.1)}, 11, 1, 0),
        ({(0, "value"): 1.0 - 4.1 * math.hypot(0.1, 0.1)}, 11, 0, 1),
        # The errors of both count.
        ({(0, "value"): 1.8, (0, "error"): 0.19}, 10, 2, 0),
        ({(0, "error"): 0.21}, 11, 0, 1),
        ({(0, "value"): None}, 11, 0, 1),
        ({(2, "value"): 1.0}, 11, 0, 1),
        ({(1, "method"): "naive"}, 11, 0, 1),
        ({(2, "method"): "naive"}, 11, 0, 1),
        ({(1, "n_tasks"): 199}, 11, 1, 0),
        ({(1, "n_tasks"): 201}, 11, 0, 1),
    ],
)
def test_agreement_is_by_standard_errors(change, same, near, apart):
    found = EXPECTED.copy()
    for (row, column), value in change.items():
        found.loc[row, column] = value
    agreed = publish.agreement("page.table", found, EXPECTED)
    assert agreed[1:4] == (same, near, apart)
    assert agreed.holds == (apart == 0)
    assert agreed.equal == (same == 12)
    assert f"{same} of 12 numbers are the same" in agreed.said()
    assert ("APART" in agreed.said()) == (apart > 0)


@pytest.mark.parametrize(
    "found", [None, EXPECTED.iloc[:2], EXPECTED.rename(columns={"value": "mean"})]
)
def test_tables_of_another_shape_do_not_agree(found):
    agreed = publish.agreement("page.table", found, EXPECTED)
    assert not agreed.holds
    assert agreed.said() in (
        "not published",
        "other columns, or another number of rows, than expected",
    )


def test_missing_values_of_any_kind_agree():
    columns = {"x": pd.array([1, None], dtype="Int64")}
    other = pd.DataFrame({"x": [1.0, math.nan]})
    assert publish.agreement("t", pd.DataFrame(columns), other)[1:4] == (2, 0, 0)
    assert publish.agreement("t", pd.DataFrame({"x": [1.0, 2.0]}), pd.DataFrame(columns))[3] == 1
