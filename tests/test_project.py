"""The files around the package: lock, citation, notebooks, README."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import qdq

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {".git", ".venv", "_build", "__pycache__"}


def project_files() -> list[Path]:
    """List the files that git tracks or would add; all of them where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in ROOT.rglob("*") if not LEFT_OUT & set(path.parts)]
    return [path for path in files if path.is_file()]


def notebooks() -> list[Path]:
    return sorted(path for path in project_files() if path.suffix == ".ipynb")


@pytest.mark.parametrize("path", sorted((ROOT / "qdq").glob("*.py")), ids=lambda path: path.stem)
def test_examples_give_what_they_say(path: Path) -> None:
    if ">>> " in path.read_text("utf-8"):
        found = doctest.testmod(importlib.import_module(f"qdq.{path.stem}"))
        assert found.attempted > 0
        assert found.failed == 0


def test_lock_pins_and_hashes_everything_and_names_no_host() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|@ |^-", text, re.MULTILINE)
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) > 100
    for entry in entries:
        first, *hashes = entry.split(" \\\n")
        assert re.fullmatch(r"[a-z0-9._-]+==[\w.+!]+( ; .+)?", first), first
        assert hashes, first
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes), first


def test_lock_holds_all_that_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["build-system"]["requires"]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    locked = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements.lock").read_text(), re.M))
    assert {re.match(r"[\w.-]+", line)[0].lower() for line in wanted} <= locked
    assert re.search(r"^jupyter-book==1\.", (ROOT / "requirements.lock").read_text(), re.M)


def test_citation_is_complete_and_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == qdq.__version__
    for entry in (citation, *citation["references"]):
        assert all({"name"} <= set(who) or {"family-names"} <= set(who) for who in entry["authors"])
    assert citation["references"][0]["title"].startswith("Experimentation for Different Scheduling")


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    # Written in pieces, so that this file does not match itself.
    folder = re.compile(r"(?<![\w.~}/-])/(" + "|".join(["work", "root", "tmp", "home"]) + ")/")
    for path in project_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        assert not folder.search(text), path.relative_to(ROOT)


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_notebooks_store_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text("utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "papermill" not in notebook["metadata"]
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(
        re.findall(r"^make ([a-z]+)|`make ([a-z]+)", (ROOT / "README.md").read_text(), re.M)
    )
    assert {a or b for a, b in named} == {"book", "test"}
    assert {"book", "test", "help"} <= targets


def test_files_at_the_top_are_the_agreed_ones() -> None:
    agreed = {"book", "qdq", "tests", "_config.yml", "_toc.yml", "pyproject.toml", "README.md"}
    agreed |= {"LICENSE", "CITATION.cff", "Makefile", "CHANGELOG.md", "requirements.lock"}
    top = {path.relative_to(ROOT).parts[0] for path in project_files()}
    assert {name for name in top if not name.startswith(".")} <= agreed
