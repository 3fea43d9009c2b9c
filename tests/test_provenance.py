"""Provenance: complete, JSON-native, and the same wherever and whenever it is taken."""

from __future__ import annotations

import json
import platform
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import qdq
from qdq import provenance as module
from qdq.provenance import provenance, show_provenance, source_hash


def test_entries_are_those_documented_and_come_after_what_was_run():
    entries = provenance(seed=3, design=qdq.Switchback(50.0), scenario=qdq.Scenario())
    assert list(entries) == [
        *("seed", "design", "scenario", "qdq", "source", "commit", "python"),
        *("numpy", "numba", "scipy", "pandas", "machine"),
    ]
    assert entries["design"] == {"type": "Switchback", "period": 50.0, "propensity": 0.5}
    assert qdq.Scenario.from_dict(entries["scenario"]) == qdq.Scenario()
    assert entries["qdq"] == qdq.__version__
    assert entries["numpy"] == np.__version__
    assert entries["python"] == platform.python_version()


def test_all_is_json_native_and_survives_a_round_trip():
    entries = provenance(
        loads=np.array([0.5, 0.9]),
        count=np.int64(3),
        pairs=[(1, 2), (2, 3)],
        nested={"a": {"b": None}},
    )
    assert json.loads(json.dumps(entries, allow_nan=False)) == entries
    assert entries["loads"] == [0.5, 0.9]
    assert entries["pairs"] == [[1, 2], [2, 3]]
    assert type(entries["count"]) is int


def test_nothing_tells_one_machine_or_moment_from_another():
    text = json.dumps(provenance(seed=1))
    assert text == json.dumps(provenance(seed=1))
    host = platform.node()
    assert not host or f'"{host}"' not in text
    assert str(Path(module.__file__).parent) not in text


@pytest.mark.parametrize(
    ("value", "where"), [(Path("x"), "what"), ({"a": [1, {2}]}, r"what\.a\[1\]"), (print, "what")]
)
def test_what_json_cannot_hold_is_refused_by_name(value, where):
    with pytest.raises(TypeError, match=f"^{where} is a .*: it must be a number"):
        provenance(what=value)


def test_our_own_entries_are_not_overwritten():
    with pytest.raises(ValueError, match=r"^numpy is an entry of its own"):
        provenance(numpy="1")


def _package(folder: Path, **contents: str) -> Path:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / f"{name}.py").write_bytes(content.encode())
    return folder


def test_source_hash_is_that_of_the_files():
    assert source_hash() == source_hash()
    assert len(source_hash()) == 64
    assert source_hash() == module._hash_of_folder(Path(qdq.__file__).parent)


def test_source_hash_depends_on_names_and_contents_alone(tmp_path):
    one = _package(tmp_path / "one", a="x = 1\n", b="y = 2\n")
    hashed = module._hash_of_folder(one)
    (one / "__pycache__").mkdir()
    (one / "notes.txt").write_text("not source")
    assert module._hash_of_folder(one) == hashed
    same = {
        "elsewhere": {"b": "y = 2\n", "a": "x = 1\n"},
        "dos": {"a": "x = 1\r\n", "b": "y = 2\r\n"},
    }
    other = {
        "content": {"a": "x = 1\n", "b": "y = 3\n"},
        "name": {"a": "x = 1\n", "c": "y = 2\n"},
        "border": {"a": "x = 1\ny", "b": " = 2\n"},
        "fewer": {"a": "x = 1\n"},
    }
    for name, contents in same.items():
        assert module._hash_of_folder(_package(tmp_path / name, **contents)) == hashed
    for name, contents in other.items():
        assert module._hash_of_folder(_package(tmp_path / name, **contents)) != hashed


@pytest.fixture
def checkout(tmp_path):
    folder = _package(tmp_path / "checkout" / "qdq", __init__="")

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(folder.parent), *identity, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    try:
        git("init", "--quiet")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    return folder, git


def test_commit_is_that_of_the_checkout(checkout, monkeypatch):
    folder, git = checkout
    git("tag", "--annotate", "v1", "--message", "a tag must not replace the commit")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert module._commit_of_folder(folder) == commit
    (folder / "__init__.py").write_text("x = 1\n")
    assert module._commit_of_folder(folder) == f"{commit}-dirty"
    monkeypatch.setenv("GIT_DIR", str(folder))  # as git sets it for its hooks
    assert module._commit_of_folder(folder) == f"{commit}-dirty"


def test_commit_of_a_repository_around_an_installed_copy_is_not_ours(checkout):
    folder, _ = checkout
    installed = _package(folder.parent / "env" / "qdq", __init__="")
    assert module._commit_of_folder(installed) is None


def test_no_commit_outside_of_a_checkout_or_without_git(tmp_path, checkout, monkeypatch):
    assert module._commit_of_folder(_package(tmp_path / "plain", __init__="")) is None
    assert module._commit_of_folder(tmp_path / "missing") is None
    monkeypatch.setenv("PATH", "")
    assert module._commit_of_folder(checkout[0]) is None


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert "open" not in dict(attrs)  # collapsed

    def handle_data(self, data):
        self.text += data


def test_shown_is_a_collapsed_block_that_holds_the_same():
    shown = show_provenance(seed=3, note="a < b & c")
    assert shown.entries == provenance(seed=3, note="a < b & c")
    assert json.loads(repr(shown)) == shown.entries
    for block in (shown._repr_html_(), shown._repr_markdown_()):
        page = _Tags()
        page.feed(block)
        assert page.tags == ["details", "summary", "pre"]
        assert json.loads(page.text[page.text.index("{") :]) == shown.entries
        assert "\n\n" not in block  # Markdown would end it there
