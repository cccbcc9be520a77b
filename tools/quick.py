"""Runs the quick tests of what differs from main, committed or not, and prints what it left out.

    python tools/quick.py [--list] [ARGS of pytest ...]

A file of tests is chosen if it has changed, or if it imports or names what has changed. With no
change, or with one that cannot be traced (to pyproject.toml, a conftest.py, data), `CORE` is. Tests
marked slow are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC, TESTS = ROOT / "src", ROOT / "tests"
PYTEST = ("-m", "pytest", "-n", "2", "--dist=loadfile", "--no-loadscope-reorder", "-m", "not slow")
# What all else is built on, without models.
CORE = {
    *("cache", "decode", "engine", "events", "scheduler"),
    *("test_contract.py", "test_layers.py", "test_docs.py"),
}
READ_ALL_FILES = {"test_layers.py", "test_docs.py"}
SLOW_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)


def changed_files() -> set[Path]:
    """Raises CalledProcessError or FileNotFoundError where git cannot tell."""
    branches = _git("branch", "--all", "--format=%(refname:short)")
    main = next((name for name in ("main", "origin/main") if name in branches), "HEAD")
    (base,) = _git("merge-base", "HEAD", main)
    names = _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names}


def _git(*command: str) -> list[str]:
    return subprocess.check_output(["git", "-C", str(ROOT), *command], text=True).splitlines()


def choose(changed: Iterable[Path], files: Iterable[Path]) -> set[Path]:
    """Those of the files of tests that are close to a change."""
    words = [word for path in changed if (word := _word(path)) is not None]
    has_word = re.compile(rf"\b({'|'.join(words)})\b") if words else None
    core = CORE if not changed or not all(map(_is_traced, changed)) else set()
    return {
        path
        for path in files
        if path in changed
        or path.name in READ_ALL_FILES
        or path.relative_to(TESTS).parts[0] in core
        or (has_word is not None and has_word.search(path.read_text(encoding="utf-8")))
    }


def _word(path: Path) -> str | None:
    """What files that use this one have in them."""
    if path.suffix == ".py" and path.name != "conftest.py":
        parts = path.relative_to(SRC if path.is_relative_to(SRC) else path.parent).with_suffix("").parts
        return re.escape(".".join(parts).removesuffix(".__init__"))
    return None


def _is_traced(path: Path) -> bool:
    return path.suffix == ".md" or path.is_relative_to(ROOT / "docs") or _word(path) is not None


def main(args: list[str]) -> int:
    every = sorted(TESTS.rglob("test_*.py"))
    files = [path for path in every if not SLOW_FILE.search(path.read_text(encoding="utf-8"))]
    try:
        changed = changed_files()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"git does not tell what has changed: {error}")
        changed = set()
    chosen = sorted(choose(changed, files))
    if "--list" in args:
        print(*(path.relative_to(ROOT) for path in chosen), sep="\n")
        return 0
    command = [sys.executable, *PYTEST, *args, *map(str, chosen)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    reason = "are close to what differs from main" if changed else "make the core: nothing differs"
    print(
        f"{len(chosen)} of {len(files)} files of quick tests were run, which {reason}. Not run: the "
        f"others, {len(every) - len(files)} slow files and what is marked slow. `make test` runs all."
    )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
