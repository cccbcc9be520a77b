"""The rules in `tools/mutants/`, which `make mutants` breaks, name code and tests that exist."""

from __future__ import annotations

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
