"""Every rule in `tools/mutants/` is broken once, and a test must notice each."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "mutation_check.py"
TABLES = sorted(table.stem for table in (SCRIPT.parent / "mutants").glob("*.toml"))


@pytest.mark.parametrize("table", TABLES)
def test_every_rule_names_code_and_tests_that_exist(table: str) -> None:
    root = SCRIPT.parents[1]
    text = (SCRIPT.parent / "mutants" / f"{table}.toml").read_text(encoding="utf-8")
    for mutant in tomllib.loads(text)["mutant"]:
        code = root.joinpath(mutant["file"]).read_text(encoding="utf-8")
        assert code.count(mutant["old"]) == 1, mutant["name"]
        for test in mutant["tests"]:
            path, _, name = test.partition("::")
            source = root.joinpath(path).read_text(encoding="utf-8")
            name = name.partition("[")[0]
            assert not name or f"def {name}(" in source, test


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on two cores, more beside other work
@pytest.mark.skipif(not SCRIPT.exists(), reason="tools/ is not beside the tests")
def test_a_test_notices_every_broken_rule() -> None:
    command = [sys.executable, SCRIPT, "--trust-tests"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
