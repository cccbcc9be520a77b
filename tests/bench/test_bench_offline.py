"""The benchmarks over the offline API, on the toy backend; ceilings from a checkpoint's headers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import growth as growth_module
from bundled import BUNDLED_PATH
from ceilings import Ceilings, Context, Experts, Mlx, Products, Torch, read_products
from churn import measure_rates
from features import features
from growth import growth
from one_batch import one_batch
from pippin import LLM, SamplingParams
from pippin.config import Config, ModelConfig
from pippin.types import Component, LayerSpec, ModelSpec
from shared import WARM_UPS, Compared, Pairs, engine_beside, in_turn

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
    assert "Ceilings are measured" in report.notes[-1]


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
    assert all(seconds > 0 for _, seconds in (*rates.decode_steps, *rates.chunks))
    assert rates.prefill_tokens_per_second > 0
    assert rates.new_prefill >= 0.0
    assert rates.new_decode == 0.0  # the toy has no shapes
    assert "tok/s; decode steps of" in str(rates)


def test_growth_covers_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_module, "SKEWS", (200, 100_000))
    monkeypatch.setattr(growth_module, "SKEWED_ROWS", 3)
    monkeypatch.setattr(growth_module, "TREE_PROMPT", 2_000)
    monkeypatch.setattr(growth_module, "FILL_PROMPT", 500)
    monkeypatch.setattr(growth_module, "TREE_TOKENS", (2_000, 6_000))
    monkeypatch.setattr(growth_module, "REQUESTS", (1, 8))
    report = growth(TOY)
    assert report.data["skew"][0][0] == 200
    assert 7000 < report.data["skew"][1][0] < 8192  # cut to what the model holds
    assert [x for x, _ in report.data["requests"]] == [1, 8]
    assert all(y > 0 for points in report.data.values() for _, y in points)
    targets = [table.rows[-1][-1].split(":")[0] for table in report.tables]
    assert targets == ["at most 1.3", "at most 5", "at most 1"]
    assert all(row[-1] == "" for table in report.tables for row in table.rows[:-1])


def test_overlap_runs_both_ways_in_turn() -> None:
    report = features(TOY, only=["overlap"], streams=3, output=24, pairs=3)
    found = report.data["overlap"]
    rates = found["tokens_per_second"]
    assert [len(rates[way]) for way in ("tried", "base")] == [3, 3]
    ratios = [a / b for a, b in zip(rates["tried"], rates["base"], strict=True)]
    assert rates["ratio"] == pytest.approx(sorted(ratios)[1])
    for way in ("overlap", "no_overlap"):
        assert 0 <= found[way]["device_idle_share"] <= 1
        assert 0 <= found[way]["whole_idle_share"] <= 1
        assert found[way]["host_seconds"] > 0
    throughput, step, idle, *_ = report.tables[0].rows
    assert throughput[-1].startswith("at least 1.00x: ")
    assert step[0] == "step, ms"
    assert idle[1] == f"{found['overlap']['device_idle_share']:.1%}"
    assert idle[-1].startswith("at most 5%: ")


def test_pairs_swap_who_goes_first_and_drop_the_warm_up() -> None:
    calls: list[str] = []
    tried, base = in_turn(
        3, lambda name: calls.append(f"a {name}") or name, lambda name: calls.append("b") or name
    )
    assert tried == base == ["pair 0", "pair 1", "pair 2"]
    measured = calls[2 * WARM_UPS :]
    assert measured == ["a pair 0", "b", "b", "a pair 1", "a pair 2", "b"]


def test_a_compared_row_has_medians_the_ratio_and_its_target() -> None:
    pairs = Pairs([1.03, 2.02, 5.0], [1.0, 2.0, 1.0])
    row = Compared("ms", pairs, 1e3, at_most=1.03).cells
    assert row == ("ms", "2,020", "1,000", "1.030x", "1.020-3.015", "at most 1.03x: met")
    assert Compared("ms", pairs, at_least=1.1).cells[-1] == "at least 1.10x: missed"
    assert Compared("ms", pairs).cells[-1] == ""


def test_engines_beside_each_other_share_a_model_and_nothing_else() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompt = list(range(1, 90))
    with LLM(config=TOY) as llm:
        plain = engine_beside(llm, prefix_cache=False, overlap=False)
        texts = [engine.generate(prompt, params)[0] for engine in (llm, plain, llm, plain)]
        assert len({tuple(text.tokens) for text in texts}) == 1
        assert [text.cached_tokens > 0 for text in texts] == [False, False, True, False]
        assert plain.loop.backend is llm.loop.backend
        assert plain.metrics is not llm.metrics


def test_products_are_the_bundled_models_matrices() -> None:
    products = read_products(BUNDLED_PATH)
    assert products is not None
    assert products.head == (8192, 384)  # tied: the embedding
    weights = mx.load(str(BUNDLED_PATH / "model.safetensors"))
    assert isinstance(weights, dict)
    used = {name: w for name, w in weights.items() if not name.startswith("mtp")}
    matrices = [w.size for w in used.values() if w.ndim == 2]
    assert sum(o * i for o, i in products.layers) + 8192 * 384 == sum(matrices)


def test_experts_count_as_far_as_tokens_take_them(tmp_path: Path) -> None:
    weights = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": (6, 4) for n in range(8)}
    weights |= {"model.layers.0.mlp.gate.weight": (8, 4), "model.embed_tokens.weight": (12, 4)}
    weights |= {"model.layers.1.mlp.experts.down_proj": (8, 4, 6)}  # in one piece
    arrays = {name: mx.zeros(shape) for name, shape in weights.items()}
    mx.save_safetensors(str(tmp_path / "m.safetensors"), arrays)
    (tmp_path / "config.json").write_text('{"text_config": {"num_experts_per_tok": 2}}')
    products = read_products(tmp_path)
    experts = (Experts(8, 2, (6, 4)), Experts(8, 2, (4, 6)))
    assert products == Products([(8, 4)], (12, 4), "F32", experts)
    assert products.flops_per_token() == 2 * (8 * 4 + 2 * 2 * 24)
    assert products.step_numbers(1) == pytest.approx((8 + 12) * 4 + 2 * 2 * 24)
    assert products.step_numbers(1000) == pytest.approx((8 + 12) * 4 + 2 * 8 * 24)


def test_a_long_context_counts() -> None:
    layers = (LayerSpec(0, Component.ATTENTION, 10), LayerSpec(1, Component.WINDOW, 8, 100))
    state = LayerSpec(2, Component.STATE, 1000)
    context = Context(ModelSpec("m", 12, 4096, (*layers, state)), 64)
    assert context.step_bytes(50) == 50 * 18 + 2 * 1000
    assert context.step_bytes(1000) == 1000 * 10 + 100 * 8 + 2 * 1000
    whole, windowed = 1000 * 1000 / 2, 100 * 100 / 2 + 900 * 100
    assert context.prompt_flops(1000) == 4 * 64 * (whole + windowed)


@pytest.mark.parametrize(
    ("library", "experts"),
    [(Mlx, ()), (Torch, ()), (Torch, (Experts(8, 2, (32, 16)),))],
    ids=["mlx", "torch", "torch with experts"],
)
def test_ceilings_count_every_weight_once(
    library: type[Mlx | Torch], experts: tuple[Experts, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if library is Torch:
        pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")
    for name in ("MEMORY_BYTES", "CPU_MEMORY_BYTES"):
        monkeypatch.setattr(f"ceilings.{name}", 1 << 16)
    monkeypatch.setattr("ceilings.MEMORY_SIDE", 64)
    products = Products([(32, 16), (16, 32)], (64, 16), "F16", experts)
    ceilings = Ceilings(products, library("F16", "float32"))
    of_experts = 4 * 2 * 32 * 16 if experts else 0
    assert ceilings.step_bytes(1) == 4 * (32 * 16 + 16 * 32 + 64 * 16) + of_experts
    assert ceilings.flops_per_token() == 2 * (32 * 16 + 16 * 32) + of_experts // 2
    assert ceilings.prefill_seconds(8) > 0
    assert ceilings.decode_seconds(2) > 0
    assert ceilings.memory_bytes_per_second() > 0
