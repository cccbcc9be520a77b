"""Counting locked bytes, or forgetting a heap or a window's users, makes a test fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "mutation_check.py"
MUTANTS = (
    "locked bytes count as evictable",
    "states are never queued",
    "a window goes while an end looks back on it",
)


@pytest.mark.skipif(not SCRIPT.exists(), reason="tools/ is not beside the tests")
def test_a_test_notices_what_would_break_eviction() -> None:
    command = [sys.executable, SCRIPT, *MUTANTS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 of 3 mutants killed" in result.stdout
