"""Run the book's notebooks and render them: python book/build.py --help.

Each notebook runs by papermill in a staging copy of the book and its result is kept under a key
made of all it depends on, so that an interrupted or repeated build runs only what is missing.
The finished book replaces _build/html in one step, and only if every page ran and rendered.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from html.parser import HTMLParser
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, get_args, get_origin

import nbformat
import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
TYPES = {kind.__name__: kind for kind in (bool, dict, float, int, list, str)}
MEGABYTE = 1_000_000


class BuildError(Exception):
    """The build cannot go on; the message says why."""


@dataclass(frozen=True)
class Parameter:
    type: Any  # a class, or a generic alias such as list[float]
    default: Any
    comment: str


@dataclass(frozen=True)
class Page:
    path: Path  # from the root of the project, with suffix
    parameters: Mapping[str, Parameter]
    reads_pages: bool = False  # runs after the others, whose published tables it reads

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def runs(self) -> bool:
        return self.path.suffix == ".ipynb"


def type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value read from YAML is of a parameter's type; an int will do for a float."""
    args = get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(
            fits(key, args[0]) and fits(item, args[1]) for key, item in value.items()
        )
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def read_assignment(statement: ast.stmt) -> tuple[str, Any, Any]:
    """Read `name: type = default`; ValueError and its like if it is anything else."""
    match statement:
        case ast.AnnAssign(ast.Name(name), annotation, ast.expr() as given):
            kind = eval(ast.unparse(annotation), {"__builtins__": {}}, TYPES)
            default = ast.literal_eval(given)
            if fits(default, kind):
                return name, kind, default
    raise ValueError(statement)


def read_parameters(path: Path, where: str) -> dict[str, Parameter]:
    """Read the typed names in the notebook's `parameters` cell."""
    from papermill.translators import PythonTranslator

    cells = nbformat.read(path, as_version=4).cells
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) > 1:
        raise BuildError(f"{where}: {len(tagged)} cells are tagged `parameters`; one at most")
    parameters = {}
    for cell in tagged:
        for statement in ast.parse(cell.source).body:
            try:
                name, kind, default = read_assignment(statement)
            except (AttributeError, NameError, TypeError, ValueError):
                raise BuildError(
                    f"{where}: the parameters cell holds only lines like "
                    f"`load: float = 0.8  # unit and range`, not `{ast.unparse(statement)}`"
                ) from None
            line = cell.source.splitlines()[(statement.end_lineno or 1) - 1].encode()
            comment = line[statement.end_col_offset :].decode().strip(" #")
            parameters[name] = Parameter(kind, default, comment)
        seen = {parameter.name for parameter in PythonTranslator.inspect(cell)}
        if unseen := [name for name in parameters if name not in seen]:
            raise BuildError(
                f"{where}: papermill cannot parse the line of {', '.join(unseen)} in the "
                "parameters cell; write plain types, and `=` only once, not in the comment"
            )
    return parameters


def toc_files(entry: Any) -> Iterator[str]:
    """Every `root` and `file` of a _toc.yml, in order."""
    if isinstance(entry, list):
        for item in entry:
            yield from toc_files(item)
    elif isinstance(entry, dict):
        for key, value in entry.items():
            if key in ("root", "file"):
                yield value
            else:
                yield from toc_files(value)


def read_pages(root: Path) -> dict[str, Page]:
    """Read the pages of the table of contents, by name."""
    pages: dict[str, Page] = {}
    for file in toc_files(yaml.safe_load((root / "_toc.yml").read_text("utf-8"))):
        found = [path for suffix in (".ipynb", ".md") if (path := root / (file + suffix)).exists()]
        if len(found) != 1:
            raise BuildError(f"_toc.yml: {file} needs one file, .ipynb or .md; found {len(found)}")
        path = found[0].relative_to(root)
        if path.suffix == ".md" and "{code-cell}" in found[0].read_text("utf-8"):
            raise BuildError(f"{path}: only .ipynb pages run, and this one has code cells")
        page = Page(path, {})
        if page.runs:
            metadata = nbformat.read(found[0], as_version=4).metadata
            last = metadata.get("qdq", {}).get("reads_pages", False)
            page = Page(path, read_parameters(found[0], str(path)), last)
        if page.name in pages:
            raise BuildError(f"_toc.yml: two pages are named {page.name}")
        pages[page.name] = page
    return pages


def choose_values(
    pages: dict[str, Page], root: Path, chosen_set: str, assignments: list[str]
) -> dict[str, dict[str, Any]]:
    """Collect the values that differ from each notebook's own cell, all checked."""
    values: dict[str, dict[str, Any]] = {name: {} for name in pages}

    def put(where: str, page: str, name: str, value: Any) -> None:
        if page not in pages:
            raise BuildError(f"{where}: no page {page!r}; the pages are {', '.join(pages)}")
        known = pages[page].parameters
        if name not in known:
            raise BuildError(
                f"{where}: page {page} has no parameter {name!r}; "
                f"it has {', '.join(known) or 'none'}"
            )
        if not fits(value, known[name].type):
            raise BuildError(
                f"{where}: {page}.{name} must be {type_name(known[name].type)}, "
                f"not {value!r} ({type(value).__name__}); its default is {known[name].default!r}"
            )
        values[page][name] = value

    if chosen_set != "standard":
        file = root / "book" / "params" / f"{chosen_set}.yml"
        for page, given in (yaml.safe_load(file.read_text("utf-8")) or {}).items():
            for name, value in (given or {}).items():
                put(f"{chosen_set}.yml", page, name, value)
    for text in assignments:
        match = re.fullmatch(r"([^.=]+)\.([^.=]+)=(.*)", text, re.DOTALL)
        if not match:
            raise BuildError(f"--set {text}: write page.parameter=value")
        put(f"--set {text}", match[1], match[2], yaml.safe_load(match[3]))
    return values


def cache_key(root: Path, page: Page, values: dict[str, Any], before: Iterable[str] = ()) -> str:
    """Hash all that a notebook's outputs depend on; `before`: the results that it reads."""
    text = (root / page.path).read_text("utf-8")
    sources = [root / page.path, root / "requirements.lock", root / "book" / "claims.yml"]
    sources += [*sorted((root / "qdq").rglob("*.py")), *sorted((root / "book/data").rglob("*"))]
    for path in sorted((root / "book" / "results").rglob("*")):
        # A page's own results, and what it names.
        if page.reads_pages or path.name.split(".")[0] == page.name or path.name in text:
            sources.append(path)
    keys = [values, sys.version_info[:2], *before]
    digest = hashlib.sha256(json.dumps(keys, sort_keys=True).encode())
    for source in sources:
        if source.is_file():
            digest.update(f"\n{source.relative_to(root).as_posix()} ".encode())
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return f"{page.name}-{digest.hexdigest()[:20]}"


def results_of(
    root: Path, pages: Mapping[str, Page], values: dict[str, dict[str, Any]]
) -> dict[str, Path]:
    """Where the executed notebook of each page is, or will be; the last depend on the others."""
    folder = root / "_build" / "executed"
    results: dict[str, Path] = {}
    for last in (False, True):
        before = [path.name for path in results.values() if path.exists()] if last else []
        for page in pages.values():
            if page.runs and page.reads_pages == last:
                key = cache_key(root, page, values[page.name], before)
                results[page.name] = folder / f"{key}.ipynb"
    return results


def die_with_parent() -> None:
    """End this worker, and with it its kernel, when the build is killed."""

    def watch() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def run_page(stage: Path, path: Path, values: dict[str, Any], result: Path) -> str:
    """Run one staged notebook into `result`; give back its traceback, empty if all went well."""
    import papermill
    from papermill.exceptions import PapermillException
    from traitlets.config import Config

    part = result.with_suffix(".part")
    source = stage / path
    # Ports are chosen before they are bound, so kernels that start together may clash over TCP;
    # and sockets in a shared folder may clash too.
    with tempfile.TemporaryDirectory() as sockets:
        manager = {"transport": "ipc", "ip": os.path.join(sockets, "kernel")}
        try:
            notebook = papermill.execute_notebook(
                source,
                None,
                values,
                kernel_name="python3",
                start_timeout=600,  # a busy machine may take minutes to start two of them
                progress_bar=False,
                cwd=source.parent,
                config=Config({} if sys.platform == "win32" else {"KernelManager": manager}),
            )
        except (PapermillException, RuntimeError) as error:  # the latter: a kernel that died
            return re.sub(r"\x1b\[[0-9;]*m", "", str(error) or repr(error)).strip()
    # What papermill notes down is of this run and this machine, not of the page.
    notebook.metadata.pop("papermill", None)
    for position, cell in enumerate(notebook.cells):
        cell.id = f"cell-{position}"
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
    nbformat.write(notebook, part)
    os.replace(part, result)
    return ""


def stage_book(root: Path, stage: Path) -> None:
    """Copy the book's sources, with a configuration that runs no notebook."""
    shutil.rmtree(stage, ignore_errors=True)
    leave = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "bench.py", "build.py")
    shutil.copytree(root / "book", stage / "book", ignore=leave)
    for name in ("_toc.yml", "CHANGELOG.md", "CITATION.cff", "LICENSE"):
        if (root / name).exists():
            shutil.copy2(root / name, stage / name)
    config = yaml.safe_load((root / "_config.yml").read_text("utf-8"))
    config.setdefault("execute", {})["execute_notebooks"] = "off"
    (stage / "_config.yml").write_text(yaml.safe_dump(config), "utf-8")


def run_pages(
    root: Path,
    pages: list[Page],
    values: dict[str, dict[str, Any]],
    results: dict[str, Path],
    jobs: int,
) -> None:
    """Run every page whose result is not there yet; name all that fail."""
    stage = root / "_build" / "stage"
    (root / "_build" / "executed").mkdir(parents=True, exist_ok=True)
    failed = {}
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=die_with_parent)
    try:
        waiting = {}
        for page in pages:
            if not results[page.name].exists():
                arguments = (stage, page.path, values[page.name], results[page.name])
                waiting[pool.submit(run_page, *arguments)] = page.path
        with tqdm(total=len(waiting), desc="notebooks", unit="page", disable=not waiting) as bar:
            for future in as_completed(waiting):
                if trace := future.result():
                    failed[waiting[future]] = trace
                bar.set_postfix_str(waiting[future].stem)
                bar.update()
    finally:
        pool.shutdown(cancel_futures=True)
    for path, trace in failed.items():
        print(f"\n{path} failed:\n{trace}", file=sys.stderr)
    if failed:
        raise BuildError(f"pages that failed: {', '.join(map(str, failed))}")


def render(stage: Path, strict: bool) -> Path:
    """Render the staged book with jupyter-book; strict means that a warning is a failure."""
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
    command += ["build", str(stage), "--all", "--quiet"]
    if strict:
        command += ["-n", "-W", "--keep-going"]
    # Its standard output names the staging folder, which nobody should open.
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise BuildError("jupyter-book failed, or warned of something: see above")
    html = stage / "_build" / "html"
    # The theme ships as much again that no browser asks for: source maps, and fonts in old formats.
    for spare in (*html.rglob("*.map"), *html.rglob("*.ttf")):
        spare.unlink()
    return html


class Loads(HTMLParser):
    """What a page loads by itself when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.addresses.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "shortcut icon"):
            self.addresses.append(given.get("href") or "")


def check_book(html: Path, pages: dict[str, Page], root: Path) -> None:
    """Check that every page is there, light, and of use on any machine without a network."""
    for page in pages.values():
        file = html / page.path.with_suffix(".html")
        if not file.exists():
            raise BuildError(f"{page.path}: not in the rendered book")
        text = file.read_text("utf-8")
        if str(root) in text:
            raise BuildError(f"{page.path}: the rendered page names {root}")
        loads = Loads()
        loads.feed(text)
        if outside := [a for a in loads.addresses if re.match(r"(https?:)?//", a)]:
            raise BuildError(f"{page.path}: loads from another host: {', '.join(outside)}")
        images = {file.parent / a for a in loads.addresses if "/_images/" in a}
        weight = sum(part.stat().st_size for part in {file, *images})
        if weight > MEGABYTE:
            raise BuildError(f"{page.path}: page and images weigh {weight:,} bytes, 1 MB at most")
    shared = sum(file.stat().st_size for file in (html / "_static").rglob("*"))
    if shared > 4 * MEGABYTE:
        raise BuildError(f"_static: weighs {shared:,} bytes, 4 MB at most")


def build(root: Path, only: list[str], chosen_set: str, assignments: list[str], jobs: int) -> None:
    pages = read_pages(root)
    values = choose_values(pages, root, chosen_set, assignments)
    if unknown := [name for name in only if name not in pages]:
        raise BuildError(f"--only {' '.join(unknown)}: the pages are {', '.join(pages)}")
    stage = root / "_build" / "stage"
    stage_book(root, stage)
    for last in (False, True):
        results = results_of(root, pages, values)
        notebooks = [p for p in pages.values() if p.runs and p.reads_pages == last]
        chosen = [p for p in notebooks if not only or p.name in only]
        run_pages(root, chosen, values, results, jobs)
        for page in notebooks:  # with --only, the others show the results they have, or none
            if results[page.name].exists():
                shutil.copyfile(results[page.name], stage / page.path)
    html = render(stage, strict=not only)
    check_book(html, pages, root)
    shutil.rmtree(root / "_build" / "html", ignore_errors=True)
    html.rename(root / "_build" / "html")
    print(f"The book is at {Path('_build', 'html', 'index.html')}")


def keep_tables(root: Path, only: list[str], chosen_set: str, jobs: int) -> None:
    """Run pages that publish tables, and keep these under book/results with what made them."""
    from qdq import publish

    pages = read_pages(root)
    values = choose_values(pages, root, chosen_set, [])
    if unknown := [name for name in only if name not in pages]:
        raise BuildError(f"--only {' '.join(unknown)}: the pages are {', '.join(pages)}")
    stage_book(root, root / "_build" / "stage")
    results = results_of(root, pages, values)
    chosen = [page for page in pages.values() if page.runs and not page.reads_pages]
    chosen = [page for page in chosen if (page.name in only if only else publishes(root, page))]
    run_pages(root, chosen, values, results, jobs)
    for page in chosen:
        tables = {
            name.split(".", 1)[1]: table
            for name, table in publish.published(results[page.name]).items()
        }
        defaults = {name: parameter.default for name, parameter in page.parameters.items()}
        given = defaults | values[page.name]
        given.pop("n_jobs", None)  # which changes no number
        stamp = publish.stamp(root / page.path, given)
        publish.keep(root / "book" / "results" / chosen_set, page.name, tables, stamp)
        print(f"{page.name}: {', '.join(tables) or 'no tables'}")


def publishes(root: Path, page: Page) -> bool:
    return "publish(" in (root / page.path).read_text("utf-8")


def verify(root: Path, jobs: int, confirm: bool) -> bool:
    """Run the standard set and compare its tables with those kept; say whether they agree.

    With `confirm`, what is kept of the pages that agree to the last bit, in any set, is from now on
    taken to be this source's too: a change that leaves all standard numbers as they were need not
    repeat the long runs.
    """
    from qdq import publish

    pages = read_pages(root)
    kept = publish.kept(root / "book" / "results" / "standard")
    values = choose_values(pages, root, "standard", [])
    stage_book(root, root / "_build" / "stage")
    results = results_of(root, pages, values)
    run_pages(root, [pages[name] for name in kept], values, results, jobs)
    agreements = []
    for name, expected in kept.items():
        found = publish.published(results[name])
        for table, frame in expected.tables.items():
            here = found.get(f"{name}.{table}")
            agreements.append(publish.agreement(f"{name}.{table}", here, frame))
        if confirm and all(a.equal for a in agreements[-len(expected.tables) :]):
            for chosen in ("standard", "paper"):
                publish.confirm(root / "book" / "results" / chosen, name, root / pages[name].path)
    width = max((len(a.table) for a in agreements), default=0)
    for a in agreements:
        print(f"{a.table:<{width}}  {a.said()}")
    return bool(agreements) and all(a.holds for a in agreements)


def list_pages(root: Path, chosen_set: str, assignments: list[str]) -> None:
    pages = read_pages(root)
    values = choose_values(pages, root, chosen_set, assignments)
    for page in pages.values():
        print(f"{page.name}  ({page.path})")
        for name, parameter in page.parameters.items():
            value = values[page.name].get(name, parameter.default)
            print(f"    {name}: {type_name(parameter.type)} = {value!r}  # {parameter.comment}")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python book/build.py", description="Run the notebooks and render the book."
    )
    parser.add_argument("--list", action="store_true", help="show pages and parameters, run none")
    parser.add_argument("--only", nargs="+", default=[], metavar="PAGE", help="run only these")
    parser.add_argument("--params", choices=["smoke", "standard", "paper"], default="standard")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PAGE.PARAMETER=VALUE", help="value in YAML"
    )
    parser.add_argument(
        "--keep", action="store_true", help="render nothing; keep the pages' tables in book/results"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare the standard set with the tables kept"
    )
    parser.add_argument(
        "--confirm",
        action="store_true",
        help="with --verify: where all is the same to the last bit, accept what is kept as made by "
        "the present source",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    options = parser.parse_args(arguments)
    try:
        if options.confirm and not options.verify:
            raise BuildError("--confirm goes with --verify")
        if options.list:
            list_pages(root, options.params, options.set)
        elif options.verify:
            return 0 if verify(root, options.jobs, options.confirm) else 1
        elif options.keep:
            if options.set:
                raise BuildError("--keep takes the values of a set as they are, without --set")
            keep_tables(root, options.only, options.params, options.jobs)
        else:
            build(root, options.only, options.params, options.set, options.jobs)
    except BuildError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the next build goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
