"""The book's runner, on tiny books of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml

import build as runner
from qdq import publish

PROJECT = Path(__file__).resolve().parents[1]


PARAMETERS = """\
loads: list[float] = [0.5, 0.7]  # arrival rate per server
pairs: list[list[int]] = [[1, 2]]  # control and treatment
n_tasks: int = 1000  # tasks # in each run
label: str = "a#b"
"""


def write_notebook(path: Path, *sources: str, parameters: str = "") -> None:
    new = nbformat.v4
    cells = [new.new_markdown_cell(f"# Page {path.stem}")]
    if parameters:
        cells.append(new.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells += [new.new_code_cell(source) for source in sources]
    for position, cell in enumerate(cells):
        cell.id = f"c{position}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a project with a book of two pages, set up as the real one is."""
    for folder in ("book/params", "book/data", "qdq"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(PROJECT / "_config.yml", tmp_path)
    shutil.copytree(PROJECT / "book" / "_ext", tmp_path / "book" / "_ext")
    shutil.copytree(PROJECT / "book" / "_static", tmp_path / "book" / "_static")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters:\n  - file: book/one\n"
    )
    (tmp_path / "book" / "index.md").write_text("# Index\n\nA formula: $W_i \\le V'(p)$.\n")
    (tmp_path / "book" / "references.bib").write_text("")
    (tmp_path / "book" / "params" / "smoke.yml").write_text("one: {n_tasks: 10}\n")
    (tmp_path / "qdq" / "__init__.py").write_text("")
    write_notebook(
        tmp_path / "book" / "one.ipynb", "print('loads', loads, n_tasks)", parameters=PARAMETERS
    )
    return tmp_path


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_pages(*_: object) -> None:
        raise AssertionError("a page was run")

    monkeypatch.setattr(runner, "run_pages", run_pages)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "two.n_tasks=1"], "no page 'two'; the pages are index, one"),
        (["--set", "one.tasks=1"], "no parameter 'tasks'; it has loads, pairs, n_tasks, label"),
        (["--set", "index.n_tasks=1"], "page index has no parameter 'n_tasks'; it has none"),
        (["--set", "one.n_tasks=many"], "one.n_tasks must be int, not 'many' (str)"),
        (["--set", "one.n_tasks=1.5"], "must be int, not 1.5 (float); its default is 1000"),
        (["--set", "one.n_tasks=true"], "must be int, not True (bool)"),
        (["--set", "one.loads=0.9"], "must be list[float], not 0.9 (float)"),
        (["--set", "one.loads=[a]"], "must be list[float], not ['a'] (list)"),
        (["--set", "one.pairs=[[1, 2.5]]"], "must be list[list[int]], not [[1, 2.5]]"),
        (["--set", "n_tasks=1"], "write page.parameter=value"),
        (["--only", "two"], "--only two: the pages are index, one"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert runner.main(arguments, root) == 1
    assert message in capsys.readouterr().err
    assert not (root / "_build").exists()


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("text", ["three: {n_tasks: 1}", "one: {n: 1}", "one: {n_tasks: '1'}"])
def test_parameter_sets_are_checked_too(
    root: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (root / "book" / "params" / "smoke.yml").write_text(text)
    assert runner.main(["--params", "smoke"], root) == 1
    assert "smoke.yml: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "n = 3",
        "n: int",
        "n: int = 'three'",
        "n: int = 2 * 3",
        "n: Number = 3",
        "import os",
        "n: list[int] = [0.5]",
    ],
)
def test_parameters_cells_hold_typed_plain_values(
    root: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    write_notebook(root / "book" / "one.ipynb", parameters=line)
    assert runner.main(["--list"], root) == 1
    assert f"not `{line}`" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["n: int = 3  # >= 1", "n: str = 'a=b'"])
def test_parameters_that_papermill_cannot_parse_are_refused(
    root: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    write_notebook(root / "book" / "one.ipynb", parameters=f"m: int = 1\n{line}")
    assert runner.main(["--list"], root) == 1
    assert "papermill cannot parse the line of n in the parameters cell" in capsys.readouterr().err


def test_papermill_knows_every_parameter_of_the_book(caplog: pytest.LogCaptureFixture) -> None:
    pages = [page for page in runner.read_pages(PROJECT).values() if page.runs]
    assert any(page.parameters for page in pages)
    for page in pages:
        known = papermill.inspect_notebook(PROJECT / page.path)
        assert list(known) == list(page.parameters), page.path
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_pages_that_would_not_run_or_are_missing_are_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = root / "book" / "index.md"
    index.write_text("# Index\n\n```{code-cell}\n1\n```\n")
    assert runner.main(["--list"], root) == 1
    assert "only .ipynb pages run" in capsys.readouterr().err
    index.unlink()
    assert runner.main(["--list"], root) == 1
    assert "book/index needs one file" in capsys.readouterr().err


def test_list_shows_types_values_and_comments(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["--list", "--params", "smoke", "--set", "one.loads=[1]"], root) == 0
    out = capsys.readouterr().out
    assert "loads: list[float] = [1]  # arrival rate per server" in out
    assert "n_tasks: int = 10  # tasks # in each run" in out
    assert "label: str = 'a#b'" in out


def test_the_key_depends_on_all_that_a_page_depends_on(root: Path) -> None:
    page = runner.read_pages(root)["one"]
    keys = {runner.cache_key(root, page, {}), runner.cache_key(root, page, {"n_tasks": 1})}
    assert runner.cache_key(root, page, {}) in keys
    for path in ("qdq/kernels.py", "book/data/log.csv", "requirements.lock", "book/one.ipynb"):
        with (root / path).open("a") as file:
            file.write(" ")
        keys.add(runner.cache_key(root, page, {}))
    assert len(keys) == 6
    (root / "book" / "index.md").write_text("# Another index")
    assert runner.cache_key(root, page, {}) in keys


def run(root: Path, values: dict[str, object] | None = None) -> None:
    pages = runner.read_pages(root)
    runner.stage_book(root, root / "_build" / "stage")
    given = {"index": {}, "one": values or {}}
    runner.run_pages(root, [pages["one"]], given, runner.results_of(root, pages, given), 1)


def test_a_failing_page_is_named_and_a_good_one_runs_once(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notebook(root / "book" / "one.ipynb", "1 / 0  # fails")
    assert runner.main(["--jobs", "1"], root) == 1
    err = capsys.readouterr().err
    assert "book/one.ipynb failed:" in err
    assert "ZeroDivisionError" in err
    assert not (root / "_build" / "html").exists()

    write_notebook(
        root / "book" / "one.ipynb", "import os\nprint('in', os.path.basename(os.getcwd()))"
    )
    run(root)
    (result,) = (root / "_build" / "executed").glob("*.ipynb")
    text = result.read_text()
    assert "in book" in text
    assert str(root) not in text
    assert "papermill" not in text
    written = result.stat().st_mtime_ns
    run(root)
    assert result.stat().st_mtime_ns == written


def test_a_page_depends_on_its_own_results_and_on_what_it_names(root: Path) -> None:
    page = runner.read_pages(root)["one"]
    key = runner.cache_key(root, page, {})
    (root / "book" / "results" / "paper").mkdir(parents=True)
    (root / "book" / "results" / "paper" / "two.results.parquet").write_text("2")
    assert runner.cache_key(root, page, {}) == key
    (root / "book" / "results" / "paper" / "one.results.parquet").write_text("1")
    with_own = runner.cache_key(root, page, {})
    assert with_own != key
    write_notebook(root / "book" / "one.ipynb", "open('results/bench.csv')")
    named = runner.cache_key(root, page, {})
    (root / "book" / "results" / "bench.csv").write_text("a")
    assert runner.cache_key(root, page, {}) != named


PUBLISHES = """\
import pandas as pd
from qdq.publish import publish
publish("one", results=pd.DataFrame({"x": [0.1 + 0.2, n_tasks], "x_error": [0.5, None]}))
"""
READS = """\
from qdq import publish
print("read", {page: list(tables) for page, tables in publish.executed(".").items()})
print("value", publish.executed(".")["one"]["results"]["x"].to_list())
"""


@pytest.fixture
def publishing(root: Path) -> Path:
    """Return a project whose page one publishes a table that page last reads."""
    write_notebook(root / "book" / "one.ipynb", PUBLISHES, parameters=PARAMETERS)
    write_notebook(root / "book" / "last.ipynb", READS)
    notebook = nbformat.read(root / "book" / "last.ipynb", as_version=4)
    notebook.metadata["qdq"] = {"reads_pages": True}
    nbformat.write(notebook, root / "book" / "last.ipynb")
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters:\n  - file: book/last\n  - file: book/one\n"
    )
    return root


def executed(root: Path, name: str) -> str:
    newest = max((root / "_build" / "executed").glob(f"{name}-*"), key=lambda p: p.stat().st_mtime)
    return newest.read_text()


@pytest.mark.long
def test_a_page_that_reads_pages_runs_after_them(
    publishing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "render", lambda *_, **__: publishing / "html")
    monkeypatch.setattr(runner, "check_book", lambda *_: None)
    for n_tasks in (7, 8):
        (publishing / "html").mkdir()
        assert runner.main(["--set", f"one.n_tasks={n_tasks}"], publishing) == 0
        text = executed(publishing, "last")
        assert "read {'one': ['results']}" in text
        assert f"value [0.30000000000000004, {n_tasks}.0]" in text


@pytest.mark.long
def test_tables_are_kept_and_verified(
    publishing: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.main(["--verify"], publishing) == 1  # nothing is kept
    assert runner.main(["--keep"], publishing) == 0
    assert "one: results" in capsys.readouterr().out
    kept = publish.kept(publishing / "book" / "results" / "standard")
    assert kept["one"].stamp["parameters"]["n_tasks"] == 1000
    assert kept["one"].tables["results"]["x"].to_list() == [0.1 + 0.2, 1000.0]
    assert runner.main(["--verify"], publishing) == 0
    assert "one.results  4 of 4 numbers are the same" in capsys.readouterr().out
    # Other source is accepted where it makes the same numbers, and there only.
    monkeypatch.setattr(publish, "numbers_hash", lambda: "later")
    folder = publishing / "book" / "results" / "standard"
    for error, accepted in ((0.25, False), (0.5, True)):
        kept["one"].tables["results"]["x_error"] = [error, None]
        publish.keep(folder, "one", kept["one"].tables, kept["one"].stamp)
        assert runner.main(["--verify", "--confirm"], publishing) == 0
        assert ("confirmed" in publish.kept(folder)["one"].stamp) == accepted
    monkeypatch.undo()
    assert runner.main(["--confirm"], publishing) == 1
    # The first number may move by four of its errors, the second has none.
    for old, new, code in (("0.1 + 0.2", "2.3", 0), ("2.3", "9.9", 1), ("9.9", "0.3, 1", 1)):
        notebook = publishing / "book" / "one.ipynb"
        notebook.write_text(notebook.read_text().replace(old, new))
        assert runner.main(["--verify"], publishing) == code
    out = capsys.readouterr().out
    assert "3 of 4 numbers are the same, 1 within 4 standard errors" in out
    assert "3 of 4 numbers are the same, 1 APART" in out
    assert runner.main(["--keep", "--set", "one.n_tasks=3"], publishing) == 1


def test_check_refuses_what_is_missing_heavy_or_loaded_from_elsewhere(root: Path) -> None:
    pages, html = runner.read_pages(root), root / "html"
    for name in ("index", "one"):
        (html / "book").mkdir(parents=True, exist_ok=True)
        (html / "book" / f"{name}.html").write_text('<a href="https://example.org">see</a>')
    (html / "_static").mkdir()
    runner.check_book(html, pages, root)
    page = html / "book" / "one.html"
    for text, message in [
        ('<script src="https://example.org/a.js"></script>', "loads from another host"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "loads from another host"),
        (f"<p>{root}</p>", "names"),
        ("x" * 1_000_001, "1 MB at most"),
    ]:
        page.write_text(text)
        with pytest.raises(runner.BuildError, match=message):
            runner.check_book(html, pages, root)
    page.unlink()
    with pytest.raises(runner.BuildError, match="not in the rendered book"):
        runner.check_book(html, pages, root)


@pytest.mark.long
def test_a_whole_build(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Values show in the page, formulas are MathML, and a warning keeps the last good book."""
    assert runner.main(["--params", "smoke", "--set", "one.loads=[0.875]"], root) == 0
    page = root / "_build" / "html" / "book" / "one.html"
    assert "loads [0.875] 10" in page.read_text()
    index = (root / "_build" / "html" / "book" / "index.html").read_text()
    assert "<math>" in index
    assert '<span class="unbroken"><math>' in index
    assert '<mpadded voffset="-0.25em"><mo>′</mo>' in index
    for formula in (r"$\nosuchcommand$", "{ref}`nowhere`"):
        (root / "book" / "index.md").write_text(f"# Index\n\n{formula}\n")
        assert runner.main(["--params", "smoke", "--set", "one.loads=[0.875]"], root) == 1
        assert "warned of something" in capfd.readouterr().err
        assert page.exists()


@pytest.mark.long
def test_the_configuration_alone_builds_the_book_too(root: Path) -> None:
    config = yaml.safe_load((root / "_config.yml").read_text())
    assert config["execute"]["execute_notebooks"] == "force"
    html = runner.render(root, strict=True)
    assert "loads [0.5, 0.7] 1000" in (html / "book" / "one.html").read_text()
    assert os.listdir(html / "_static" / "fonts")
