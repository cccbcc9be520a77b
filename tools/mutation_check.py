"""Breaks one rule at a time and checks that a test notices. The rules are tables in `mutants/`.

    python tools/mutation_check.py [NAME or TABLE ...]

Works on a copy in a temporary directory. Each run of tests is a fork of this process, which has
imported pytest and what else takes long, and nothing of the project; the tests' own set-up, which
prepares for models, is left out. A test that does not come to its call notices nothing. Exits 1 if
a mutant survives, 2 if its text is gone from the source (then the mutant must be written anew) or
the tests fail without one.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import hypothesis.extra.numpy  # noqa: F401  # and so numpy: what most tests import
import llguidance  # noqa: F401
import msgspec  # noqa: F401
import pytest
import xxhash  # noqa: F401
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tools" / "mutants"
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")  # what is used of those installed
# What is not used of pytest's own: to set them up takes as long as most tests.
UNUSED = (
    *("doctest", "faulthandler", "junitxml", "legacypath", "pastebin", "setuponly", "setupplan"),
    *("stepwise", "subtests", "unittest", "unraisableexception"),
)
OPTIONS = (
    *("-x", "-q", "--assert=plain", "--tb=line", "-p", "no:cacheprovider", "--noconftest"),
    "--hypothesis-profile=notice",
)
BROKEN = 3  # pytest's own status for an internal error

# That a test fails is enough: the reason is not read, so no example is made smaller.
settings.register_profile(
    "notice", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)


@dataclass(frozen=True)
class Mutant:
    table: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutants() -> tuple[Mutant, ...]:
    return tuple(
        Mutant(table.stem, **entry | {"tests": tuple(entry["tests"])})
        for table in sorted(TABLES.glob("*.toml"))
        for entry in tomllib.loads(table.read_text(encoding="utf-8"))["mutant"]
    )


MUTANTS = read_mutants()
HELPERS = (
    *("builders", "cases", "counted_lines", "damage", "evicted_segments"),
    *("live_peers", "memory_store", "oracle_drafter", "peer_world", "peers", "processes"),
    *("simulator", "integrity", "timed"),
)


def copy_project(target: Path) -> None:
    """The package without its bundled weights, and the tests that know no model."""
    shutil.copytree(
        ROOT / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__", "models")
    )
    for tests in ("cache", "engine", "events", "scheduler", "switching"):
        shutil.copytree(ROOT / "tests" / tests, target / "tests" / tests)
    for helper in HELPERS:
        shutil.copy(ROOT / "tests" / f"{helper}.py", target / "tests")
    shutil.copy(ROOT / "pyproject.toml", target)


def tests_pass(project: Path, tests: Iterable[str]) -> bool:
    output = project.parent / "output"
    child = os.fork()
    if child == 0:
        run_tests(project, tests, output)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):  # neither passed nor failed: the run broke
        raise RuntimeError(f"pytest could not run\n{output.read_text()}")
    return status == 0


def run_tests(project: Path, tests: Iterable[str], output: Path) -> None:
    """Ends the process, with pytest's exit status."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(project)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    status, calls = BROKEN, Calls()
    try:
        names = (*PLUGINS, *(f"no:{name}" for name in UNUSED))
        plugins = itertools.chain.from_iterable(("-p", name) for name in names)
        status = int(pytest.main([*plugins, *OPTIONS, *tests], plugins=[calls]))
        if status == pytest.ExitCode.TESTS_FAILED and not calls.failed:
            status = BROKEN
    finally:
        sys.stdout.flush()
        os._exit(status)


class Calls:
    """Whether a test has failed, and not only what it needs."""

    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed and report.when == "call"


def is_killed(mutant: Mutant, project: Path) -> bool:
    """Whether one of the mutant's tests fails; the file is put back afterwards."""
    path = project / mutant.file
    source = path.read_text(encoding="utf-8")
    write_newer(path, source.replace(mutant.old, mutant.new))
    try:
        return not tests_pass(project, mutant.tests)
    finally:
        write_newer(path, source)


def write_newer(path: Path, source: str) -> None:
    """Python compiles a file again if its size or the second of its change differs."""
    written = path.stat().st_mtime + 1
    path.write_text(source, encoding="utf-8")
    os.utime(path, (written, written))


def stale_mutants() -> list[str]:
    """Mutants whose text does not occur exactly once in their file."""
    return [
        mutant.name
        for mutant in MUTANTS
        if (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) != 1
    ]


def main(names: list[str]) -> int:
    if stale := stale_mutants():
        print(f"the source has changed under: {', '.join(stale)}")
        return 2
    wanted = set(names)
    if unknown := wanted - {name for mutant in MUTANTS for name in (mutant.name, mutant.table)}:
        print(f"no mutant and no table is called {min(unknown)!r}")
        return 2
    chosen = [m for m in MUTANTS if not wanted or wanted & {m.name, m.table}]
    survivors = 0
    sys.dont_write_bytecode = False  # in the copy: else every fork compiles all of it
    gc.freeze()
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory) / "pippin"
        copy_project(project)
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        if not tests_pass(project, tests):
            print("the tests fail without any mutant")
            return 2
        for mutant in chosen:
            killed = is_killed(mutant, project)
            survivors += not killed
            print(f"{'killed  ' if killed else 'SURVIVED'}  {mutant.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
