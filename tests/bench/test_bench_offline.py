"""The benchmarks over the offline API, on the toy backend; ceilings from a checkpoint's headers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

import pippin
from pippin.bench import growth as growth_module
from pippin.bench.ceilings import Ceilings, Products, read_products
from pippin.bench.growth import growth
from pippin.bench.one_batch import Timing, one_batch, summarize
from pippin.bench.wire import BenchError
from pippin.config import Config, ModelConfig

BUNDLED = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
TOY = Config(model=ModelConfig(backend="fake"))


def test_one_batch_times_every_size() -> None:
    report = one_batch(TOY, batches=(1, 4), input_len=96, output_len=16, repeats=1)
    timings = report.data["timings"]
    assert [t["batch"] for t in timings] == [1, 4]
    for t in timings:
        assert t["decode_tokens_per_second"] == pytest.approx(t["batch"] / t["decode_seconds"])
        assert t["prefill_tokens_per_second"] * t["prefill_seconds"] == pytest.approx(
            96 * t["batch"]
        )
    assert "Ceilings are measured" in report.notes[-1]


def test_too_few_steps_is_an_error_not_a_number() -> None:
    with pytest.raises(BenchError, match="steps decoded 2 rows together"):
        one_batch(TOY, batches=(2,), input_len=32, output_len=2, repeats=1)


def test_shares_are_of_the_ceilings() -> None:
    timing = Timing(4, 0.5, 800.0, 0.02, 200.0, 1600.0, 400.0, 800.0)
    (row,) = summarize([timing], {"input": 100, "output": 8}, []).tables[0].rows
    assert (row[3], row[6], row[7]) == ("50%", "50%", "25%")


def test_growth_covers_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_module, "BATCHES", (1, 3))
    monkeypatch.setattr(growth_module, "CONTEXTS", (128, 100_000))
    monkeypatch.setattr(growth_module, "SKEWED_ROWS", 3)
    monkeypatch.setattr(growth_module, "TREE_TOKENS", (4_000, 12_000))
    monkeypatch.setattr(growth_module, "REQUESTS", (1, 8))
    report = growth(TOY)
    assert [x for x, _ in report.data["batch"]] == [1, 3]
    assert report.data["context"][0][0] == 128
    assert 7000 < report.data["context"][1][0] < 8192  # cut to what the model holds
    assert {"skew", "tree", "requests"} <= report.data.keys()
    assert all(y > 0 for points in report.data.values() for _, y in points)
    assert len(report.tables) == len(report.charts) == 5


def test_growth_names_an_unknown_part() -> None:
    with pytest.raises(BenchError, match="no part 'depth'"):
        growth(TOY, only=["depth"])


def test_products_are_the_bundled_models_matrices() -> None:
    products = read_products(BUNDLED)
    assert products is not None
    assert products.head == (8192, 384)  # tied: the embedding
    weights = mx.load(str(BUNDLED / "model.safetensors"))
    assert isinstance(weights, dict)
    used = {name: w for name, w in weights.items() if not name.startswith("mtp")}
    matrices = [w.size for w in used.values() if w.ndim == 2]
    assert sum(o * i for o, i in products.layers) + 8192 * 384 == sum(matrices)


def test_an_untied_head_replaces_the_embedding(tmp_path: Path) -> None:
    weights = {
        "model.embed_tokens.weight": mx.zeros((10, 4)),
        "lm_head.weight": mx.zeros((12, 4)),
        "model.layers.0.up.weight": mx.zeros((8, 4)),
        "model.layers.0.norm.weight": mx.zeros(4),
        "visual.proj.weight": mx.zeros((4, 4)),
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    assert read_products(tmp_path) == Products([(8, 4)], (12, 4), "F32")


def test_a_quantized_checkpoint_has_no_ceilings(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "m.safetensors"), {"w": mx.zeros((2, 2), mx.uint32)})
    assert read_products(tmp_path) is None


def test_ceilings_count_every_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.bench.ceilings.MEMORY_SIDE", 64)
    ceilings = Ceilings(Products([(32, 16), (16, 32)], (64, 16), "F16"), "float32")
    assert ceilings.weight_bytes == 4 * (32 * 16 + 16 * 32 + 64 * 16)
    assert ceilings.flops_per_token() == 2 * (32 * 16 + 16 * 32)
    assert ceilings.prefill_seconds(8) > 0
    assert ceilings.decode_seconds(2) > 0
    assert ceilings.memory_bytes_per_second() > 0
