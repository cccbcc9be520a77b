"""Backends side by side: the table, and the runs that fill it."""

from __future__ import annotations

import pytest

from pippin.bench.errors import BenchError
from pippin.bench.in_process.backends import Lengths, read_timings, run_one_batch, summarize
from pippin.bench.results.plot import draw
from pippin.config import Config, EngineConfig, ModelConfig
from processes import environment


def turn(ttft: float, decode: float) -> dict[str, float]:
    return {
        "TTFT 1": ttft,
        "prefill 1": 5e5 / ttft,
        "decode 1": decode,
        "prefill 4": 1,
        "decode 4": 1,
    }


def test_the_table_holds_medians_and_how_the_others_do() -> None:
    results = {
        "mlx": [turn(200.0, 50.0), turn(100.0, 40.0), turn(120.0, 60.0)],
        "torch": [turn(60.0, 25.0), turn(50.0, 20.0), turn(40.0, 30.0)],
    }
    report = summarize("a/model", Lengths((1, 4), 500, 64), results, [])
    (table,) = report.tables
    assert table.title == "model: 500 tokens in, 64 out, medians"
    assert table.header == ("measure", "mlx", "torch", "torch times mlx")
    assert table.rows[0] == ("TTFT of 500 tokens, ms", "120", "50.0", "2.40x")
    assert table.rows[3] == ("decode, 1 row, tok/s", "50.0", "25.0", "0.50x")
    assert [row[0].split(",")[0] for row in table.rows] == [
        "TTFT of 500 tokens",
        *("prefill", "prefill", "decode", "decode"),
    ]
    assert "0.5x (50.0 and 25.0 tok/s)" in draw(report.charts)
    assert report.data["rounds"] == results


@pytest.mark.slow
def test_every_turn_is_one_batch_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    config = Config(ModelConfig(max_len=300), EngineConfig(max_running=3))
    timings = run_one_batch(config, "fake", Lengths((1, 2), input=40, output=16))
    found = read_timings(timings)
    assert [timing["batch"] for timing in timings] == [1, 2]
    assert found["TTFT 1"] == pytest.approx(40 / found["prefill 1"] * 1e3)
    assert all(value > 0 for value in found.values())


@pytest.mark.slow
def test_a_backend_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    config = Config(ModelConfig(model="nothing"))
    with pytest.raises(BenchError, match=r"(?s)fake left with status 1:.*no model 'nothing'"):
        run_one_batch(config, "fake", Lengths((1,), input=4, output=16))
