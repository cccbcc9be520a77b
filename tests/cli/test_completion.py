"""Completion in a real bash, and scripts for other shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from cli.commands import output_of
from pippin import cli
from processes import environment

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")

# What pressing Tab does: bash calls the function that was registered for the command.
PRESS_TAB = """
source "$1"
COMP_WORDS=("${@:2}"); COMP_CWORD=$(( $# - 2 )); COMP_LINE="${*:2}"; COMP_POINT=${#COMP_LINE}
completer=$(complete -p pippin | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$completer" pippin "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "pippin.bash"
    with path.open("w") as file, redirect_stdout(file), pytest.raises(SystemExit):
        cli.main(["completion", "bash"])
    return path


@pytest.fixture
def command_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `pippin` such as an installation has, in case the script asks it."""
    command = tmp_path / "bin" / "pippin"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pippin "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")


@needs_bash
@pytest.mark.usefixtures("command_on_path")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["pippin", "ser"], {"serve", "service"}),
        (["pippin", "sta"], {"status"}),
        (["pippin", "cache", "fl"], {"flush"}),
        (["pippin", "serve", "--max-r"], {"--max-running"}),
        (["pippin", "serve", "--max-mod"], {"--max-model-len"}),
        (["pippin", "serve", "--served-m"], {"--served-model-name"}),
        (["pippin", "serve", "--help-"], {"--help-all"}),
        (["pippin", "serve", "--no-ov"], {"--no-overlap"}),
        (["pippin", "serve", "--backend", ""], {"auto", "mlx", "torch", "fake"}),
        (["pippin", "bench", "ser"], {"serve"}),
        (["pippin", "completion", "z"], {"zsh"}),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",  # a set has no order
)
def test_bash_completes(script: Path, line: list[str], expected: set[str]) -> None:
    done = subprocess.run(
        ["bash", "-c", PRESS_TAB, "bash", str(script), *line],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {word.strip() for word in done.stdout.split("\n") if word.strip()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    printed = output_of(capsys, "completion", shell)
    assert "max-running" in printed
    assert "concurrency" in printed
