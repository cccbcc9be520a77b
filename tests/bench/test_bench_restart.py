"""`pippin bench restart`: conversations survive servers, and the report says how."""

from __future__ import annotations

import pytest

from bundled import BUNDLED_PATH
from pippin.bench.report import BenchError
from pippin.config import Config, EngineConfig, ModelConfig
from processes import environment
from restart import RestartBench, restart

TOY_CONFIG = Config(ModelConfig(backend="fake"))


@pytest.fixture(autouse=True)
def _children_import_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sigterm", "kill"])
def test_conversations_are_found_again_after_a_restart(how: str) -> None:
    # A model whose prompts take far longer to compute than to read.
    report = restart(Config(), only=[how], rounds=1)
    found = report.data[how]
    assert (found["asked"], found["equal"]) == (1, 1)
    assert found["prompt_tokens"] - found["cached_tokens"] <= 64
    assert found["damaged"] == 0


@pytest.mark.slow
def test_a_steady_load_stays_within_both_ceilings() -> None:
    bench = RestartBench(TOY_CONFIG, BUNDLED_PATH, rounds=1, seconds=3)
    table, found = bench.ceilings(disk="200KB")
    for limit in ("bytes on disk", "bytes in memory"):
        most, allowed = found[limit]
        assert most <= allowed
    assert found["errors"] == 0
    assert found["evicted"] > 0
    assert len(table.rows) == 3


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    with pytest.raises(
        BenchError, match="no part 'restart'; there are sigterm, kill, gaps, ceilings"
    ):
        restart(TOY_CONFIG, only=["restart"])
    with_disk = Config(TOY_CONFIG.model, EngineConfig(cache_dir="x", disk="1GB"))
    with pytest.raises(BenchError, match="remove --cache-dir"):
        restart(with_disk)
