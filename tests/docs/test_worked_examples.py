"""The worked examples of the documents, followed word by word in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGE = ("src/pippin/models", "tests/fixtures")  # linked, not copied
# A block of Python with a path is a file, one of changes is an edit of a file, one of bash is run.
BLOCK = re.compile(r"^```(python|diff|bash) ?(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", sorted(ROOT.glob("docs/contributing/add-*.md")), ids=lambda path: path.stem
)
def test_following_the_document_works(document: Path, tmp_path: Path) -> None:
    if document.stem == "add-model-family":
        pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")
    copy_checkout(tmp_path)
    blocks = BLOCK.findall(document.read_text(encoding="utf-8"))
    assert {"diff", "bash"} <= {kind for kind, _, _ in blocks}
    for kind, path, text in blocks:
        if kind == "python":
            assert not (tmp_path / path).exists()
            (tmp_path / path).write_text(text, encoding="utf-8")
        elif kind == "diff":
            edit(tmp_path / path, text)
        else:
            for line in text.splitlines():
                run(line, tmp_path)


def copy_checkout(target: Path) -> None:
    """With what Python has compiled: a copy is as old as what it was made from."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        large = {name for name in names if Path(folder, name) in {ROOT / path for path in LARGE}}
        return large | {name for name in names if ".pyc." in name}  # being written

    for folder in ("src", "tests", "docs"):
        shutil.copytree(ROOT / folder, target / folder, ignore=ignored)
    for path in LARGE:
        (target / path).symlink_to(ROOT / path)
    shutil.copy(ROOT / "pyproject.toml", target)


def edit(path: Path, diff: str) -> None:
    """One hunk: its lines without a mark, or with a minus, are in the file once."""
    lines = diff.splitlines(keepends=True)
    assert {line[0] for line in lines} <= set(" +-")
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path.name} has {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def run(line: str, directory: Path) -> None:
    python, *words = shlex.split(line)
    assert python == ".venv/bin/python"
    environment = os.environ | {"PYTHONPATH": str(directory / "src")}
    done = subprocess.run(
        [sys.executable, *words, "-q", "-p", "no:cacheprovider"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
