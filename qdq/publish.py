"""Tables that a page of the book hands on: to the scoreboard, to the archive, to a later check.

A page publishes a frame as a notebook output that is not shown. So it stays with the executed
notebook, also where papermill ran it, and is read from there. Tables of long runs are kept in
files, with a stamp that says what made them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qdq.provenance import code_hash, numbers_hash

_PREFIX = "application/papermill.record/"
_MIME = f"{_PREFIX}application/json"


def publish(page: str, **tables: pd.DataFrame) -> None:
    """Attach tables to the output of the notebook cell that runs.

    Parameters
    ----------
    page : str
        Name of the page.
    **tables : DataFrame
        By name. Columns hold numbers, strings, booleans, or nothing (missing).
    """
    from IPython.display import display

    for name, table in tables.items():
        metadata = {"scrapbook": {"name": f"{page}.{name}", "mime_prefix": _PREFIX}}
        # As text, since a notebook's schema has no JSON under such a type.
        display({_MIME: json.dumps(to_json(table))}, raw=True, metadata=metadata)  # type: ignore[no-untyped-call]


def published(notebook: str | Path) -> dict[str, pd.DataFrame]:
    """Return the tables of an executed notebook.

    Parameters
    ----------
    notebook : path

    Returns
    -------
    dict of str to DataFrame
        By ``"page.table"``, empty if there are none.
    """
    content = json.loads(Path(notebook).read_text("utf-8"))
    return {name: from_json(data) for name, data in _outputs(content)}


def _outputs(notebook: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            scrapbook = output.get("metadata", {}).get("scrapbook")
            if scrapbook and _MIME in output.get("data", {}):
                text = output["data"][_MIME]
                yield scrapbook["name"], json.loads("".join(text))


def find(name: str) -> Path:
    """Return the path of a file of the book, from wherever a page of it runs.

    Parameters
    ----------
    name : str
        Path inside the book's folder.

    Returns
    -------
    Path

    Raises
    ------
    FileNotFoundError
        If neither the working folder, nor one above it, nor a folder ``book`` in one of these, nor
        the checkout of this package holds it.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).parents[1]):
        for place in (folder / name, folder / "book" / name):
            if place.exists():
                return place
    raise FileNotFoundError(f"{name} is not in this folder, nor in a folder book above it")


def executed(folder: str | Path) -> dict[str, dict[str, pd.DataFrame]]:
    """Return the tables of all executed notebooks in a folder and below.

    Parameters
    ----------
    folder : path

    Returns
    -------
    dict of str to dict of str to DataFrame
        By page and table.
    """
    found: dict[str, dict[str, pd.DataFrame]] = {}
    for path in sorted(Path(folder).rglob("*.ipynb")):
        for name, frame in published(path).items():
            page, table = name.split(".", 1)
            found.setdefault(page, {})[table] = frame
    return found


@dataclass(frozen=True)
class Kept:
    """Tables of a page that were written to files."""

    stamp: dict[str, Any]
    """What made them: ``parameters``, the hash ``numbers`` of the package's source that numbers
    come from, and the hash ``cells`` of the cells of the page that compute; ``confirmed``, if there
    is one, is the hash of later source that makes the page's standard tables to the same bit."""
    tables: dict[str, pd.DataFrame]

    def stale(self, notebook: str | Path) -> list[str]:
        """Return what has changed since, of ``numbers`` and ``cells``."""
        now = stamp(notebook, {})
        changed = [name for name in ("numbers", "cells") if self.stamp[name] != now[name]]
        if self.stamp.get("confirmed") == now["numbers"]:
            changed = [name for name in changed if name != "numbers"]
        return changed


def keep(
    folder: str | Path, page: str, tables: Mapping[str, pd.DataFrame], stamp: Mapping[str, Any]
) -> None:
    """Write a page's tables to files ``page.table.parquet``, each whole or not at all.

    Parameters
    ----------
    folder : path
        Made if need be. Tables of the page that are there and not among these are removed.
    page : str
    tables : mapping of str to DataFrame
    stamp : mapping
        JSON-native.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for spare in folder.glob(f"{page}.*.parquet"):
        if spare.name.split(".")[1] not in tables:
            spare.unlink()
    for name, frame in tables.items():
        table = pa.Table.from_pandas(frame, preserve_index=False)
        table = table.replace_schema_metadata({"qdq": json.dumps(dict(stamp), sort_keys=True)})
        path = folder / f"{page}.{name}.parquet"
        part = path.with_suffix(".part")
        pq.write_table(table, part)
        os.replace(part, path)


def kept(folder: str | Path, page: str = "*") -> dict[str, Kept]:
    """Return what `keep` wrote to a folder, by page; nothing if there is no such folder.

    Parameters
    ----------
    folder : path
    page : str, optional
        Name of the only page to read; by default all are read.

    Returns
    -------
    dict of str to Kept
    """
    import pyarrow.parquet as pq

    found: dict[str, Kept] = {}
    for path in sorted(Path(folder).glob(f"{page}.*.parquet")):
        of_page, name, _ = path.name.split(".")
        table = pq.read_table(path)
        stamp = json.loads(table.schema.metadata[b"qdq"])
        found.setdefault(of_page, Kept(stamp, {})).tables[name] = table.to_pandas()
    return found


def confirm(folder: str | Path, page: str, notebook: str | Path) -> None:
    """Note with a page's kept tables that the present source makes them too.

    Parameters
    ----------
    folder, page
        As for `keep`; nothing happens if there are none, or if the page now computes otherwise.
    notebook : path
        The page, whose standard tables came out to the same bit.
    """
    there = kept(folder, page).get(page)
    if there is not None and there.stale(notebook) == ["numbers"]:
        keep(folder, page, there.tables, there.stamp | {"confirmed": numbers_hash()})


def run_of(page: str, chosen: str = "standard") -> Kept | None:
    """Return what the book keeps of a page.

    Parameters
    ----------
    page : str
    chosen : {'standard', 'paper'}
        The set of parameters: the page's own, or those of its long run.

    Returns
    -------
    Kept or None
    """
    return kept(find("results") / chosen, page).get(page)


def stamp(notebook: str | Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a page's tables, for `keep`.

    Parameters
    ----------
    notebook : path
        The page; its cells tagged ``compute`` are those whose code matters.
    parameters : mapping
        Values of its parameters.

    Returns
    -------
    dict
        ``parameters, numbers, cells``, as in `Kept`.
    """
    content = json.loads(Path(notebook).read_text("utf-8"))
    cells = [
        "".join(cell["source"])
        for cell in content["cells"]
        if "compute" in cell["metadata"].get("tags", ())
    ]
    return {
        "parameters": dict(parameters),
        "numbers": numbers_hash(),
        "cells": code_hash(*cells),
    }


class Agreement(NamedTuple):
    """How two versions of a table compare, number by number."""

    table: str
    same: int
    """Numbers that are the same to the last bit."""
    near: int
    """Others within four standard errors of their difference."""
    apart: int
    """Others."""
    problem: str
    """Why they can't be compared, if so."""

    @property
    def holds(self) -> bool:
        """Whether nothing is apart."""
        return not self.apart and not self.problem

    @property
    def equal(self) -> bool:
        """Whether every number is the same to the last bit."""
        return self.holds and not self.near

    def said(self) -> str:
        """Say it in a line."""
        if self.problem:
            return self.problem
        total = self.same + self.near + self.apart
        text = f"{self.same} of {total} numbers are the same"
        if self.near:
            text += f", {self.near} within 4 standard errors"
        if self.apart:
            text += f", {self.apart} APART"
        return text


def agreement(name: str, found: pd.DataFrame | None, expected: pd.DataFrame) -> Agreement:
    """Compare a table with an expected one.

    Parameters
    ----------
    name : str
        What to call it.
    found, expected : DataFrame
        A number in the column ``x`` may differ by four times the root of the sum of squares of both
        values of ``x_error`` (of ``error``, for the column ``value``). Text must be equal;
        numbers without an error, such as errors, may differ by half of the larger.

    Returns
    -------
    Agreement
    """
    if found is None:
        return Agreement(name, 0, 0, 0, "not published")
    if list(found.columns) != list(expected.columns) or len(found) != len(expected):
        return Agreement(name, 0, 0, 0, "other columns, or another number of rows, than expected")
    same = near = apart = 0
    for column in expected:
        here, there = found[column].to_numpy(object), expected[column].to_numpy(object)
        equal = pd.isna(here) & pd.isna(there)
        both = ~pd.isna(here) & ~pd.isna(there)
        equal[both] = here[both] == there[both]
        same += int(equal.sum())
        error = "error" if column == "value" else f"{column}_error"
        if error in expected:
            errors = [pd.to_numeric(frame[error]).to_numpy(float) for frame in (found, expected)]
            values = [pd.to_numeric(frame[column]).to_numpy(float) for frame in (found, expected)]
            far = np.abs(values[0] - values[1])
            close = ~equal & (far <= 4.0 * np.hypot(*errors))
        elif pd.api.types.is_numeric_dtype(expected[column]):
            # No error of its own: it may go with the numbers of its row that have one.
            close = ~equal & (found[column].notna() & expected[column].notna()).to_numpy()
            close[close] = _near(here[close], there[close])
        else:
            close = np.zeros(len(equal), np.bool_)
        near += int(close.sum())
        apart += int((~equal & ~close).sum())
    return Agreement(name, same, near, apart, "")


def _near(here: NDArray[Any], there: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether numbers without an error of their own, such as errors, agree within a half."""
    pairs = zip(here, there, strict=True)
    return np.array([abs(a - b) <= 0.5 * max(abs(a), abs(b)) for a, b in pairs], np.bool_)


def to_json(table: pd.DataFrame) -> dict[str, Any]:
    """Return a table as what JSON knows, to the last bit of its numbers."""
    return {
        "columns": [str(name) for name in table.columns],
        "rows": [[_plain(value) for value in row] for row in table.astype(object).to_numpy()],
    }


def from_json(data: Mapping[str, Any]) -> pd.DataFrame:
    """Return the table that `to_json` wrote; missing numbers are NaN."""
    table = pd.DataFrame(data["rows"], columns=data["columns"], dtype=object)
    return table.infer_objects()


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a table holds {value!r}: it must hold numbers, strings, booleans or nothing")
