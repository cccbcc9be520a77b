"""What is written for systemd and launchd, read by what we did not write."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from cases import cases
from pippin.service import Definition, Launchd, Systemd, quote

ODD_WORDS = (
    "with a space",
    'quo"te',
    "it's",
    "100%",
    "$HOME",
    "back\\slash",
    "semi;colon",
    "ü",
    "",
)


def definition(directory: Path, *words: str) -> Definition:
    command = ("/bin/echo", *words)
    return Definition("pippin", command, directory, 35, {"HF_HOME": "/models of mine/100%"})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_a_unit(tmp_path: Path) -> None:
    unit = tmp_path / "pippin.service"
    unit.write_text(Systemd("pippin").text(definition(tmp_path, "--alias", *ODD_WORDS)))
    verified = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    about_it = [line for line in verified.stderr.splitlines() if "pippin.service" in line]
    assert (verified.returncode, about_it) == (0, [])


@cases(
    ("word", "written"),
    [
        ("plain-word=1", "plain-word=1"),
        ("with a space", '"with a space"'),
        ("100%", "100%%"),  # systemd(5): % begins a specifier
        ("$HOME", "$$HOME"),  # systemd.service(5): $ begins a variable
        ('quo"te', r'"quo\"te"'),
        ("back\\slash", r'"back\\slash"'),
        ("two\nlines", r'"two\nlines"'),
        ("", '""'),
    ],
)
def test_a_word_means_itself_to_systemd(word: str, written: str) -> None:
    assert quote(word) == written


def test_an_agent_is_a_property_list_that_keeps_every_word(tmp_path: Path) -> None:
    agent = plistlib.loads(Launchd("pippin").text(definition(tmp_path, *ODD_WORDS)).encode())
    assert agent["ProgramArguments"] == ["/bin/echo", *ODD_WORDS]
    assert agent["EnvironmentVariables"]["HF_HOME"] == "/models of mine/100%"
