"""The cache of compiled kernels: never stale, never mixed up, and not needed.

Every step is a process of its own, on a copy of the package.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "qdq"
# A small caller of a kernel that is inlined and of one that is linked in.
CALLER = """

@jit
def calls(x):
    lines = np.full((1, 8), 2.0)
    none = np.zeros(1, np.int64)
    bits = lines.view(np.uint64)
    return tasks_after(0, 1.0, bits, none, none, none, none) + log(x)
"""
RUN = "from qdq import kernels; print(kernels.calls(2.0))"
OLD = pytest.approx(8 + math.log(2), abs=1e-12)
NEW = pytest.approx(7 + math.log(2) + 0.1, abs=1e-12)
PATIENCE = 120  # seconds


def copy_kernels(folder: Path) -> Path:
    """Copy the kernels alone: importing all of the package takes a second more."""
    package = folder / "qdq"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text((SOURCE / "kernels.py").read_text() + CALLER)
    return package


def edit(package: Path) -> None:
    """Let log 2 be 0.1 more and a line have 7 departures; size and time of the file stay."""
    path = package / "kernels.py"
    stat = path.stat()
    text = path.read_text()
    begin = text.index("def tasks_after")
    changed = text[:begin].replace("LN2_HIGH = 6.", "LN2_HIGH = 7.") + text[begin:].replace(
        "range(8)", "range(7)", 1
    )
    assert [len(changed), sum(a != b for a, b in zip(changed, text, strict=True))] == [len(text), 2]
    path.write_text(changed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def forget_bytecode(package: Path) -> None:
    for path in package.glob("__pycache__/*.pyc"):
        path.unlink()


def start(package: Path, code: str, home: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name[:5] != "NUMBA"}
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    environment |= {"HOME": str(home)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=package.parent,  # the first place that Python looks at
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[float, str]:
    out, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, complaints
    return float(out), complaints


def run(package: Path, code: str = RUN) -> float:
    return end(start(package, code, package.parent))[0]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the kernels that has run, so that bytecode and machine code are in its folder."""
    package = copy_kernels(tmp_path_factory.mktemp("used"))
    assert run(package) == OLD
    assert list(package.glob("__pycache__/*.nbi"))
    return package


@pytest.fixture
def edited(used: Path, tmp_path: Path) -> Path:
    package = tmp_path / "qdq"
    shutil.copytree(used, package)
    edit(package)
    return package


def test_what_counts_is_the_code_that_runs(edited: Path) -> None:
    # Python itself goes by size and time, and so runs the old bytecode once more ...
    assert run(edited) == OLD
    # ... which must not be kept as what the new source compiles to.
    forget_bytecode(edited)
    assert run(edited) == NEW


def test_a_write_that_fails_is_done_without_and_leaves_nothing_stale(edited: Path) -> None:
    forget_bytecode(edited)
    full = """
import numba.core.caching

def no_space(*arguments):
    raise OSError(28, "no space left on device")

numba.core.caching.IndexDataCacheFile._save_data = no_space
"""
    assert run(edited, full + RUN) == NEW
    assert run(edited) == NEW


def test_processes_that_compile_side_by_side_do_not_mix_up_their_files(tmp_path: Path) -> None:
    package = copy_kernels(tmp_path)
    (package / "__pycache__").touch()  # a file: the package can't be written, the home can
    # Both processes find an empty cache; the one for integers writes the index first and the
    # machine code last.
    race = """
import sys, time
from pathlib import Path
from numba.core.caching import IndexDataCacheFile

me, folder = sys.argv[1], Path(sys.argv[2])

def done(step):
    (folder / f"{me} {step}").touch()

def wait(step):
    while not (folder / step).exists():
        time.sleep(0.01)

def in_turn(name, before):
    plain = getattr(IndexDataCacheFile, name)
    calls = []
    def method(*arguments):
        calls.append(name)
        wait_for = before.get(len(calls))
        if wait_for:
            wait(wait_for)
        result = plain(*arguments)
        done(f"{name} {len(calls)}")
        return result
    setattr(IndexDataCacheFile, name, method)

other = {"int": "float", "float": "int"}[me]
in_turn("_load_index", {})
in_turn("_save_index", {1: f"{other} _load_index 2" if me == "int" else "int _save_index 1"})
in_turn("_save_data", {1: "float _save_data 1"} if me == "int" else {})
from qdq import kernels
print(kernels.log({"int": 2, "float": 2.0}[me]))
"""
    both = [start(package, race, tmp_path, me, str(tmp_path)) for me in ("int", "float")]
    for process in both:
        end(process)
    assert list(tmp_path.rglob("*.nbi"))
    assert run(package, "from qdq import kernels; print(kernels.log(2.5))") == pytest.approx(
        0.9162907318741551, rel=1e-15
    )


def test_nothing_needs_to_be_writable(tmp_path: Path) -> None:
    package = tmp_path / "qdq"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__pycache__").touch()
    home = tmp_path / "home"
    home.touch()
    process = start(package, "import qdq; print(qdq.kernels.log(1.0))", home)
    value, complaints = end(process)
    assert value == 0.0
    assert complaints.count("set NUMBA_CACHE_DIR") == 1
