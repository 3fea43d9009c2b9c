"""Tables that a page of the book hands on: to the scoreboard, to the archive, to a later check.

A page publishes a frame as a notebook output that is not shown. So it stays with the executed
notebook, also where papermill ran it, and is read from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

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
