"""`pippin bench restart`: conversations survive servers, and the report says how."""

from __future__ import annotations

import pytest

from bundled import BUNDLED_PATH
from pippin.bench.errors import BenchError
from pippin.bench.served.restart import PARTS, RestartBench, restart
from pippin.bench.served.restart_report import Gaps, Restarted, SteadyLoad, summarize
from pippin.config import Config, EngineConfig, ModelConfig
from processes import environment

TOY_CONFIG = Config(ModelConfig(backend="fake"))


@pytest.fixture(autouse=True)
def _children_import_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sigterm", "kill"])
def test_conversations_are_found_again_after_a_restart(how: str) -> None:
    # A model whose prompts take far longer to compute than to read.
    report = restart(Config(), BUNDLED_PATH, only=[how], rounds=1)
    (found,) = report.data["restarts"]
    assert (found["asked"], found["equal"]) == (1, 1)
    assert found["prompt_tokens"] - found["cached_tokens"] <= 64
    assert found["damaged"] == 0


@pytest.mark.slow
def test_a_steady_load_stays_within_both_ceilings() -> None:
    bench = RestartBench(TOY_CONFIG, BUNDLED_PATH, lambda text: len(text.split()), 1)
    found = bench.ceilings(seconds=3, disk="200KB")
    assert found.within
    assert found.errors == 0
    assert found.evicted > 0


def test_the_report_shows_shares_ratios_and_ceilings() -> None:
    restarted = [
        Restarted("sigterm", 3, 3, 2000, 2000, 1.0, 0.02, 0, 0),
        Restarted("kill", 3, 2, 2000, 1984, 1.0, 0.03, 1, 0),
    ]
    gaps = Gaps([0.022, 0.021, 0.5], [0.020, 0.020, 0.020])
    report = summarize(restarted, gaps, SteadyLoad(60, 90, 100, 10, 50, 110, 100, 7, 0), [])
    restarts, streams, ceilings = report.tables
    assert [row[-2:] for row in restarts.rows] == [("2.0%", "3 of 3"), ("3.0%", "2 of 3")]
    assert streams.rows == [("20.0", "22.0", "1.10x")]
    assert [row[-1] for row in ceilings.rows] == ["90.0%", "20.0%", "110.0%"]
    assert report.data["ceilings"]["within"]
    assert not SteadyLoad(60, 101, 100, 10, 50, 110, 100, 7, 0).within


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    with pytest.raises(BenchError, match=f"no part 'restart'; there are {', '.join(PARTS)}"):
        restart(TOY_CONFIG, BUNDLED_PATH, only=["restart"])
    with_disk = Config(TOY_CONFIG.model, EngineConfig(cache_dir="x", disk="1GB"))
    with pytest.raises(BenchError, match="leave --cache-dir away"):
        restart(with_disk, BUNDLED_PATH)
