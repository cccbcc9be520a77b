"""Workflows of GitHub do what a person can do: each step is a target of the Makefile, which runs
with the make and the shell that macOS has."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from pippin import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
MAKE = re.compile(r"make ([a-z-]+)(?: ARGS=\"[^\"`;|&]*\")?$")
# Of GNU make newer than 3.81, and of bash newer than 3.2: what macOS has is older.
NEW_IN_MAKE = (
    r"\.ONESHELL|\.RECIPEPREFIX|\.SHELLFLAGS|\$\((file|let|intcmp) |!=|::=|^undefine |--output-sync"
)
NEW_IN_BASH = r"declare -A|mapfile|readarray|\$\{\w+(,,|\^\^|@)|&>>|\|&|wait -n|coproc|\$\{\w+: -"


def load(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text())
    return found


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in load(workflow)["jobs"].values() for step in job["steps"]]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_there_is_one_to_test_one_for_the_night_and_one_to_release() -> None:
    assert [path.stem for path in WORKFLOWS] == ["nightly", "release", "test"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_step_is_a_target_of_the_makefile(workflow: Path) -> None:
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for command in commands:
        found = MAKE.fullmatch(command)
        assert found, f"not a target of make alone: {command}"
        assert found[1] in targets()
        assert "${{" not in command, "an expression in a shell is an injection: use env"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_are_few(workflow: Path) -> None:
    content = load(workflow)
    assert content["permissions"] == {"contents": "read"}
    assert "cancel-in-progress" in content["concurrency"]
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 90
        asked = job.get("permissions", {})
        assert asked in ({}, {"id-token": "write"})
        assert bool(asked) == (job.get("environment") == "pypi")
    for used in (step["uses"] for step in steps(workflow) if "uses" in step):
        assert re.fullmatch(r"(actions|pypa)/[\w-]+@(v\d+|release/v\d+)", used), used


def test_linux_on_both_architectures_and_a_mac_are_tested() -> None:
    content = load(ROOT / ".github/workflows/test.yml")
    assert content["jobs"]["test"]["strategy"]["matrix"]["os"] == [
        *("ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"),
    ]
    run = [step["run"] for step in steps(ROOT / ".github/workflows/test.yml") if "run" in step]
    assert {"make test", "make doctor", "make bench-short"} <= set(run)


def test_only_what_was_built_for_a_tag_is_published() -> None:
    content = load(ROOT / ".github/workflows/release.yml")
    assert content[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    build, publish = content["jobs"]["build"], content["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"]), "no code of ours beside the token"
    assert "permissions" not in build


def test_a_release_needs_its_tag_and_real_addresses() -> None:
    for tag, said in (("v9.9.9", "they must agree"), (f"v{__version__}", "pippin.example")):
        command = [sys.executable, "tools/dist.py", "--release", tag, "unused"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1
        assert said in done.stderr


def test_the_makefile_runs_with_the_make_of_macos() -> None:
    recipes = [line for line in MAKEFILE.splitlines() if not line.startswith("#")]
    assert not re.search(NEW_IN_MAKE, "\n".join(recipes), re.MULTILINE)


def test_the_script_of_ci_runs_with_the_bash_of_macos() -> None:
    assert not re.search(NEW_IN_BASH, (ROOT / ".ci" / "run").read_text())


def test_no_two_files_differ_by_case_alone() -> None:
    """The file system of macOS would keep one of them."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    counts = Counter(name.lower() for name in listed.stdout.splitlines())
    assert [name for name, count in counts.items() if count > 1] == []
