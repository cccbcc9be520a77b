"""Runs the quick tests of what differs from main, committed or not, and prints what it left out.

    python tools/quick.py [--list] [ARGS of pytest ...]

A file of tests is chosen if it imports what has changed, or if it lies where the tests of the
changed package do and reaches it through other imports; what starts `pippin` as a process imports
its `__main__`. With no change, or with one that cannot be traced (to pyproject.toml, a conftest.py,
data of the tests), `CORE` is. Tests marked slow are left out.

pytest-picked sees changed tests alone, and pytest-testmon needs a run of everything first and does
not look into other processes.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC, TESTS, TOOLS = ROOT / "src", ROOT / "tests", ROOT / "tools"
PYTEST = ("-m", "pytest", "--dist=loadfile", "--no-loadscope-reorder", "-m", "not slow")
NUM_WORKERS = 2
# What all else is built on, without models.
CORE = {
    *("cache", "decode", "engine", "events", "scheduler"),
    *("test_contract.py", "test_layers.py", "test_docs.py"),
}
MAIN = ("main", "origin/main")
STARTS_PIPPIN = re.compile(r'"-m", "pippin"|-m pippin|(?<!def )\brun_python\(')
# What pippin/__init__.py imports on first use.
LAZY = {"pippin.LLM": "pippin.offline.llm", "pippin.AsyncLLM": "pippin.offline.async_llm"}
SLOW_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)
READ_ALL_FILES = {TESTS / "test_layers.py", TESTS / "test_docs.py"}
TESTS_BY_NAME = {path.stem: path for path in TESTS.rglob("*.py")}  # no two are called the same


def changed_files() -> set[Path]:
    """Raises CalledProcessError or FileNotFoundError where git cannot tell."""
    main = next((name for name in MAIN if _git("rev-parse", "-q", "--verify", name)), "HEAD")
    (base,) = _git("merge-base", "HEAD", main, check=True)
    names = _git("diff", "--name-only", base, check=True)
    names += _git("ls-files", "--others", "--exclude-standard", check=True)
    return {ROOT / name for name in names}


def _git(*command: str, check: bool = False) -> list[str]:
    git = ["git", "-C", str(ROOT), *command]
    return subprocess.run(git, capture_output=True, text=True, check=check).stdout.splitlines()


def choose(changed: Iterable[Path], files: Iterable[Path]) -> set[Path]:
    """Those of the files of tests that are close to a change."""
    modules: set[Path] = set()
    words: set[str] = set()  # a file of tests that has one of them reads what has changed
    folders: set[str] = CORE if not changed else set()
    for path in changed:
        if path.suffix == ".py" and path.is_relative_to(SRC):
            modules.add(path)
        elif path.is_relative_to(SRC):
            modules |= set(_package(path.parent).glob("*.py"))
        elif path.suffix == ".py" and path.is_relative_to(TESTS) and path.name != "conftest.py":
            modules.add(path)
        elif path.is_relative_to(TOOLS):
            words.add(path.relative_to(TOOLS).parts[0].removesuffix(".py"))
        elif path.suffix != ".md" and not path.is_relative_to(ROOT / "docs"):
            folders = CORE
    return {
        path
        for path in files
        if path in READ_ALL_FILES
        or path.relative_to(TESTS).parts[0] in folders
        or any(_is_close(path, module) for module in modules & reached(path))
        or any(word in _text(path) for word in words)
    }


def _is_close(test: Path, module: Path) -> bool:
    if module in (test, *imported(test)):
        return True
    if module.is_relative_to(TESTS):
        return False
    package = module.relative_to(SRC / "pippin").parts[0]
    return test.is_relative_to(TESTS / package)


def _package(directory: Path) -> Path:
    """The nearest one around a file that is no module."""
    while not (directory / "__init__.py").exists():
        directory = directory.parent
    return directory


@cache
def reached(path: Path) -> frozenset[Path]:
    """Every file that is imported when this one is, at once or later on; itself too."""
    found, left = set(), [path]
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            left += imported(path)
    return frozenset(found)


@cache
def imported(path: Path) -> tuple[Path, ...]:
    if path == SRC / "pippin" / "__init__.py":
        return ()
    names = {name for node in ast.walk(_tree(path)) for name in _names(node)}
    names |= {package for name in names for package in _packages(name)}
    if path.is_relative_to(TESTS):
        names |= {"pippin.__main__"} if STARTS_PIPPIN.search(_text(path)) else set()
        fixtures = [folder / "conftest.py" for folder in path.parents if folder != TESTS]
    else:
        fixtures = []
    found = [file for name in names if (file := _file_of(name)) is not None]
    return (*found, *(file for file in fixtures if file.exists() and file.is_relative_to(TESTS)))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _packages(name: str) -> Iterator[str]:
    """Those around a module, which are imported with it."""
    return itertools.accumulate(name.split(".")[:-1], "{}.{}".format)


@cache
def _file_of(name: str) -> Path | None:
    """Of a module of ours; tests are imported by the last part of their names."""
    name = LAZY.get(name, name)
    if name.split(".")[0] != "pippin":
        return TESTS_BY_NAME.get(name.split(".")[-1])
    path = SRC.joinpath(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.exists()), None)


def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main(args: list[str]) -> int:
    every = sorted(TESTS.rglob("test_*.py"))
    files = [path for path in every if not SLOW_FILE.search(_text(path))]
    try:
        changed = changed_files()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"git does not tell what has changed: {error}")
        changed = set()
    chosen = sorted(choose(changed, files))
    if "--list" in args:
        print(*(path.relative_to(ROOT) for path in chosen), sep="\n")
        return 0
    workers = ("-n", str(min(NUM_WORKERS, len(chosen))))
    command = [sys.executable, *PYTEST, *workers, *args, *map(str, chosen)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    reason = "are close to what differs from main" if changed else "make the core: nothing differs"
    print(
        f"{len(chosen)} of {len(files)} files of quick tests were run, which {reason}. Not run: the "
        f"others, {len(every) - len(files)} slow files and what is marked slow. `make test` runs all."
    )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
