"""Tools that only people run: that they run at all, on little."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"

pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="tools/ is not beside the tests")


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_cost_of_planning_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = load_tool("host_cost")
    little = {"NUM_NODES": 100, "NUM_RUNNING": 8, "NUM_WAITING": 10, "STEPS": 3, "NUM_LONG": 3}
    for name, value in {**little, "LONG_PROMPT": 300, "NUM_EVICTIONS": 5}.items():
        monkeypatch.setattr(tool, name, value)
    assert tool.main() == 0
    said = capsys.readouterr().out
    assert said.count("plan") == 7  # two for each of three layouts, and where bytes are short
    assert said.count("evictions") == 3
