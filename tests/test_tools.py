"""Tools that only people run: that they run at all, on little."""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest

from cases import cases
from processes import environment

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"

pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="tools/ is not beside the tests")


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


quick = cache(partial(load_tool, "quick"))


@cases(
    ("changed", "chosen", "passed_over"),
    [
        ("src/pippin/cache/tree/radix.py", "cache/test_eviction.py", "scheduler/test_replies.py"),
        ("src/pippin/bench/report.py", "bench/test_bench_report.py", "scheduler/test_pace.py"),
        ("tests/builders.py", "scheduler/test_replies.py", "text/test_cut_json.py"),
        ("tests/text/test_cut_json.py", "text/test_cut_json.py", "text/test_tokenizer.py"),
        ("tools/fuzz_bodies.py", "api/test_hostile_bodies.py", "text/test_cut_json.py"),
        ("docs/api/overview.md", "test_docs.py", "test_serve.py"),
    ],
)
def test_quick_tests_are_those_close_to_a_change(
    changed: str, chosen: str, passed_over: str
) -> None:
    files = {ROOT / "tests" / chosen, ROOT / "tests" / passed_over}
    assert all(path.exists() for path in files)
    assert quick().choose({ROOT / changed}, files) == {ROOT / "tests" / chosen}


@pytest.mark.parametrize("changed", ["pyproject.toml", "tests/conftest.py", "tests/api/some.json"])
def test_the_core_is_run_for_what_cannot_be_traced(changed: str) -> None:
    core, other = ROOT / "tests/cache/test_locks.py", ROOT / "tests/text/test_cut_json.py"
    assert quick().choose({ROOT / changed}, [core, other]) == {core}
    assert quick().choose(set(), [core, other]) == {core}
    assert quick().choose({ROOT / changed, other}, [core, other]) == {core, other}


@pytest.mark.slow
def test_a_newcomer_follows_a_streamed_chat_through_so_many_files_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Limits for a reader to carry, a little above today's (docs/internals/source-tree.md): a chat
    that needs more has to become simpler elsewhere."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    tool = load_tool("trace_request")
    calls = tool.count()
    for in_backends, most_files, most_functions in ((False, 58, 600), (True, 42, 330)):
        files, functions = tool.passed_through(calls, in_backends)
        assert 10 < files <= most_files
        assert 100 < functions <= most_functions
