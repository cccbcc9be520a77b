"""What an engine is put together of: rows that a device holds, fingerprints, and times to exit."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from pippin import supervision
from pippin.backends import fake as fake_backend
from pippin.backends.fake import FakeBackend
from pippin.cache.disk.disk_store import MAX_SEGMENT_BYTES
from pippin.cli.service import STOP_MARGIN_S
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine import build_loop as building
from pippin.engine import run
from pippin.engine.build_loop import (
    RunningRows,
    build_loop,
    fingerprint,
    rows_that_fit,
    rows_to_load,
)
from pippin.engine.engine_spec import LAST_STEP_SECONDS, SLOWEST_DISK
from pippin.errors import ConfigError
from pippin.scheduler.request import FLUSH_SECONDS

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


FAKE = Config(model=ModelConfig(backend="fake"))
DETERMINISTIC = Config(model=FAKE.model, engine=EngineConfig(deterministic=True))


@pytest.mark.parametrize("config", [FAKE, DETERMINISTIC], ids=["plain", "deterministic"])
def test_the_number_of_a_backends_arithmetic_counts(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fingerprint(config, FakeBackend())
    assert fingerprint(config, FakeBackend()) == first
    monkeypatch.setattr(fake_backend, "ARITHMETIC_VERSION", fake_backend.ARITHMETIC_VERSION + 1)
    assert fingerprint(config, FakeBackend()) != first


def test_with_safe_nothing_is_read_that_our_operations_wrote() -> None:
    safe = Config(model=FAKE.model, engine=EngineConfig(safe=True))
    assert fingerprint(safe, FakeBackend()) != fingerprint(FAKE, FakeBackend())


def test_backends_name_their_number_and_their_libraries() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("mlx.core")
    from pippin.backends.mlx import backend as mlx_backend
    from pippin.backends.torch import backend as torch_backend

    of_mlx = mlx_backend.MLXBackend.arithmetic.fget(None)  # type: ignore[attr-defined]
    of_torch = torch_backend.TorchBackend.arithmetic.fget(None)  # type: ignore[attr-defined]
    assert of_torch == f"torch {torch_backend.ARITHMETIC_VERSION}, torch {torch.__version__}"
    mlx_version = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    assert of_mlx == f"mlx {mlx_backend.ARITHMETIC_VERSION}, {mlx_version}"


def test_an_engine_has_time_to_write_behind_and_to_sync_before_it_exits_by_force() -> None:
    unsynced = MAX_SEGMENT_BYTES + building.MOST_BATCH_BYTES
    writing = FLUSH_SECONDS + unsynced / SLOWEST_DISK
    assert writing + LAST_STEP_SECONDS <= run.EXIT_GRACE_SECONDS


def test_each_waits_longer_than_what_it_waits_for() -> None:
    assert run.EXIT_GRACE_SECONDS < supervision.STOP_GRACE_SECONDS
    assert run.EXIT_GRACE_SECONDS < building.STOP_GRACE_SECONDS, "or a restart has no disk tier"
    assert supervision.STOP_GRACE_SECONDS < STOP_MARGIN_S
