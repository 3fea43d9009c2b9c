"""What produced a number: specification and seed, source, commit, and the versions that matter.

Nothing here tells one machine or moment from another (no hosts, paths, times), so that what two
people write down can be compared.
"""

from __future__ import annotations

import ast
import hashlib
import html
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

_FOLDER = Path(__file__).parent
_PACKAGES = ("numpy", "numba", "scipy", "pandas")


def _hash_of_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


# Taken on import: the files may be edited while the code of before is running.
_SOURCE_HASH = _hash_of_folder(_FOLDER)


def source_hash() -> str:
    """Return the SHA-256 of the package's source, in hexadecimal.

    It covers the names and the contents of ``qdq/*.py`` in sorted order, whatever folder they are
    in and however their lines end.
    """
    return _SOURCE_HASH


# Modules that the numbers of a simulation study come out of, read on import too.
_NUMBERS = tuple(
    (_FOLDER / f"{name}.py").read_text("utf-8")
    for name in (
        *("designs", "estimators", "exact", "grid", "horizon", "inference", "kernels", "policies"),
        *("scenario", "simulate", "streaming", "study"),
    )
)


def code_hash(*sources: str) -> str:
    """Return a SHA-256 of what some Python code does, whatever its comments and docstrings say.

    Parameters
    ----------
    *sources : str
        Code. How it is laid out does not matter, nor does the version of Python.

    Returns
    -------
    str
    """
    shapes = [_shape(ast.parse(source)) for source in sources]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()


def _shape(node: Any) -> Any:
    if isinstance(node, list):
        return [_shape(part) for part in node if not _is_text(part)]
    if not isinstance(node, ast.AST):
        return repr(node)
    # Versions of Python differ in whether they list fields that are empty.
    fields = ((name, part) for name, part in ast.iter_fields(node) if part not in (None, []))
    return [type(node).__name__, *((name, _shape(part)) for name, part in fields)]


def _is_text(node: Any) -> bool:
    """Whether it is a docstring, or the like under a field."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text and isinstance(node.value.value, str)


@cache
def numbers_hash() -> str:
    """Return the `code_hash` of the modules that the numbers of a simulation study come out of.

    It stays the same when only words, figures or the command line change.
    """
    return code_hash(*_NUMBERS)


@cache
def _commit() -> str | None:
    return _commit_of_folder(_FOLDER)


def _commit_of_folder(folder: Path) -> str | None:
    """Return the short commit of the checkout that tracks the folder's __init__.py, or None."""
    # Git hooks set variables that would point git at another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=10.0, check=True
        )
        return result.stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _plain(name: str, value: Any) -> Any:
    """Return `value` as what JSON knows."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{name}[{i}]", part) for i, part in enumerate(value)]
    raise TypeError(
        f"{name} is a {type(value).__name__}: it must be a number, a string, a list or a mapping "
        "of them, or have to_dict()"
    )


def provenance(**what: Any) -> dict[str, Any]:
    """Return what produced a number, as a JSON-native dictionary.

    Parameters
    ----------
    **what
        What was run, such as ``scenario=``, ``design=``, ``seed=`` or ``study=``: numbers, strings,
        lists and mappings of them, arrays, or objects with ``to_dict()``.

    Returns
    -------
    dict
        The entries of `what`, and then "qdq" (version), "source" (`source_hash`), "commit" (of the
        package's git checkout, with "-dirty" if files were changed since; None outside of one),
        "python", "numpy", "numba", "scipy", "pandas" (versions) and "machine" (processor type).

    Raises
    ------
    TypeError
        If an entry can't be written as JSON.
    ValueError
        If an entry has the name of one of ours.

    Examples
    --------
    >>> import qdq
    >>> provenance(design=qdq.Bernoulli(0.5), seed=1)["design"]
    {'type': 'Bernoulli', 'propensity': 0.5}
    """
    from qdq import __version__  # set only once the package is imported

    ours = {
        "qdq": __version__,
        "source": source_hash(),
        "commit": _commit(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in _PACKAGES},
        "machine": platform.machine(),
    }
    for name in what:
        if name in ours:
            raise ValueError(f"{name} is an entry of its own in every provenance: use another name")
    return {name: _plain(name, value) for name, value in what.items()} | ours


@dataclass(frozen=True)
class ShownProvenance:
    """A provenance that a notebook shows as a block to unfold."""

    entries: dict[str, Any]

    def __repr__(self) -> str:
        lines = (
            f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
            for name, value in self.entries.items()
        )
        return "{\n" + ",\n".join(lines) + "\n}"

    def _block(self) -> str:
        # No blank line inside, since Markdown would end the block there.
        text = html.escape(repr(self), quote=False)
        return (
            "<details><summary>Provenance: what produced these numbers</summary>\n"
            f'<pre style="white-space: pre-wrap">{text}</pre>\n</details>'
        )

    def _repr_html_(self) -> str:
        return self._block()

    def _repr_markdown_(self) -> str:
        return self._block()


def show_provenance(**what: Any) -> ShownProvenance:
    """Return `provenance` of the same arguments as a collapsed block, for the end of a page.

    Parameters
    ----------
    **what
        As for `provenance`.

    Returns
    -------
    ShownProvenance
        Shown by a notebook if it is the last expression of a cell; `entries` holds the dictionary.

    Raises
    ------
    TypeError, ValueError
        As `provenance`.
    """
    return ShownProvenance(provenance(**what))
