"""Removing the fence, the ghost rule or the slot indexing makes a test fail: this proves it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "tools" / "mutation_check.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not SCRIPT.exists(), reason="tools/ is not beside the tests")
def test_every_mutant_still_fits_the_source() -> None:
    assert load_script().stale_mutants() == []


@pytest.mark.skipif(not SCRIPT.exists(), reason="tools/ is not beside the tests")
def test_a_test_fails_without_the_fence_the_ghost_rule_or_the_slot_index() -> None:
    mutants = ["no fence", "no ghost rule", "tokens by batch order, not by slot"]
    assert load_script().main(mutants) == 0
