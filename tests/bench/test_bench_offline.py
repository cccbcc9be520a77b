"""The benchmarks over the offline API, on the toy backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from churn import measure_rates
from one_batch import one_batch
from pippin import LLM, SamplingParams
from pippin.config import Config, ModelConfig
from shared import WARM_UPS, Pairs, engine_beside, in_turn

TOY = Config(model=ModelConfig(backend="fake"))


def test_one_batch_times_every_size() -> None:
    report = one_batch(TOY, batch=[1, 4], input=[32, 96], output=16, repeats=1)
    timings = report.data["timings"]
    assert [(t["batch"], t["input"]) for t in timings] == [(1, 32), (1, 96), (4, 32), (4, 96)]
    for t in timings:
        assert t["decode_tokens_per_second"] == pytest.approx(t["batch"] / t["decode_seconds"])
        assert t["prefill_tokens_per_second"] * t["prefill_seconds"] == pytest.approx(
            t["input"] * t["batch"]
        )


ON_TORCH_ALONE = """
import sys
sys.modules["mlx"] = None
from one_batch import one_batch
from pippin.config import Config, ModelConfig
config = Config(model=ModelConfig(backend="torch"))
report = one_batch(config, batch=[1], input=[16], output=16, repeats=1)
print(report.data["timings"][0]["batch"], *("torch" in report.machine, "mlx.core" in sys.modules))
"""


@pytest.mark.slow
def test_one_batch_runs_on_torch_where_there_is_no_mlx() -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")
    run = subprocess.run(
        [sys.executable, "-c", ON_TORCH_ALONE],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2] / "tools" / "bench",
    )
    assert run.stdout.split() == ["1", "True", "False"], run.stderr


def test_rates_of_one_batch_are_measured_at_each_width() -> None:
    rates = measure_rates(TOY, [1, 3])
    assert [rows for rows, _ in rates.decode_steps] == [1, 3]
    assert all(seconds > 0 for _, seconds in rates.decode_steps)
    assert rates.prefill_tokens_per_second > 0
    assert "tok/s; decode steps of" in str(rates)


def test_pairs_swap_who_goes_first_and_drop_the_warm_up() -> None:
    calls: list[str] = []
    pairs = in_turn(
        3,
        lambda name: calls.append(f"a {name}") or float(name[-1]),
        lambda name: calls.append("b") or float(name[-1]),
    )
    assert pairs.tried == pairs.base == [0.0, 1.0, 2.0]
    measured = calls[2 * WARM_UPS :]
    assert measured == ["a pair 0", "b", "b", "a pair 1", "a pair 2", "b"]


def test_a_compared_row_has_medians_the_ratio_and_its_target() -> None:
    pairs = Pairs([1.03, 2.02, 5.0], [1.0, 2.0, 1.0])
    row = pairs.row("ms", 1e3, at_most=1.03)
    assert row == ("ms", "2,020", "1,000", "1.030x", "1.020-3.015", "at most 1.03x: met")
    assert pairs.row("ms", at_least=1.1)[-1] == "at least 1.10x: missed"
    assert pairs.row("ms")[-1] == ""


def test_engines_beside_each_other_share_a_model_and_nothing_else() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompt = list(range(1, 90))
    with LLM(config=TOY) as llm:
        plain = engine_beside(llm, prefix_cache=False)
        texts = [engine.generate(prompt, params)[0] for engine in (llm, plain, llm, plain)]
        assert len({tuple(text.tokens) for text in texts}) == 1
        assert [text.cached_tokens > 0 for text in texts] == [False, False, True, False]
        assert plain.loop.backend is llm.loop.backend
        assert plain.metrics is not llm.metrics
