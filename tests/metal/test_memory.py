"""What Metal is asked for in memory, counted here: budgets (tools/metal_memory.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "metal_memory.py"


@pytest.fixture(scope="module")
def counted() -> Any:
    done = subprocess.run(
        [sys.executable, TOOL, "--json", "--rows", "4", "16", "64"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("rows", "share", "sizes"), [("4", 0.035, 21), ("16", 0.055, 26), ("64", 0.07, 35)]
)
def test_steps_of_requests_that_start_and_end_have_few_shapes(
    counted: Any, rows: str, share: float, sizes: int
) -> None:
    load = counted[rows]
    assert load["new_shapes"] <= load["traced"] <= share * load["steps"]
    assert load["sizes"] <= sizes


def test_rows_are_ten_buffers_a_layer(counted: Any) -> None:
    """Four segments and a tail, keys and values, however many rows there are."""
    assert {load["buffers"] for load in counted.values()} == {10}
