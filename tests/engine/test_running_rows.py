"""`--max-running auto`: the most that pay on a device, or what its memory holds."""

from __future__ import annotations

import pytest

from pippin.backends.fake import FakeBackend
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import RunningRows, build_loop, rows_that_fit, rows_to_load
from pippin.errors import ConfigError

AUTO, GIVEN = EngineConfig(), EngineConfig(max_running=5)
GB = 10**9


@pytest.mark.parametrize(
    ("kind", "budget_bytes", "expected"),
    [
        ("cuda", 120 * GB, 256),
        ("cuda", 6 * GB, 88),  # 89 rows of 64 MiB, in eights
        ("cuda", GB // 10, 8),
        ("cpu", GB, 64),
        ("metal", 120 * GB, 64),
    ],
)
def test_what_is_loaded_depends_on_the_device_and_its_budget(
    kind: str, budget_bytes: int, expected: int
) -> None:
    rows = rows_to_load(AUTO, kind, budget_bytes)
    assert rows.number == expected
    assert rows.reason.startswith("auto: ")
    assert rows_to_load(GIVEN, kind, budget_bytes) == RunningRows(5, "--max-running")


def test_a_draft_model_s_keys_are_those_of_few_rows() -> None:
    config = EngineConfig(draft_model="small")
    assert rows_to_load(config, "cuda", 120 * GB).number == 32


def test_fewer_run_where_the_memory_for_requests_holds_fewer() -> None:
    loaded = rows_to_load(AUTO, "cuda", 120 * GB)
    per_token = 10**5
    for capacity_bytes, expected in ((100 * GB, 256), (4 * GB, 32), (GB // 100, 8)):
        rows = rows_that_fit(AUTO, loaded, capacity_bytes, lambda n: n * per_token)
        assert rows.number == expected
    assert "1,024 tokens" in rows.reason
    given = rows_to_load(GIVEN, "cuda", GB)
    assert rows_that_fit(GIVEN, given, 1, lambda n: n * per_token) is given


@pytest.mark.parametrize(("memory", "expected"), [("auto", 64), ("8MB", 24)])
def test_an_engine_reports_its_number_and_why(memory: str, expected: int) -> None:
    config = Config(ModelConfig(backend="fake"), EngineConfig(memory=memory))
    loop = build_loop(config, lambda _: None, backend=FakeBackend())
    status = loop.status()
    loop.close()
    assert status["slots"] == expected
    assert status["slots_reason"].startswith("auto: ")


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_running must be at least 1, got 0"):
        EngineConfig(max_running=0)
