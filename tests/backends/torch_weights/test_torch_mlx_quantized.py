"""mlx's affine 4 and 8 bits on torch, in plain operations: against mlx and mlx-lm."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from mlx_checkpoints import as_mlx_saves, mlx_logits, torch_logits
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.formats.integers import read_mlx
from pippin.backends.torch.load import load
from pippin.backends.torch.models.packed import MOST_DENSE, Packed, Stacked, cat, dense, times
from pippin.errors import LoadError
from torch_families import TORCH_CONFIGS, checkpoint


def quantized(rows: int, size: int, bits: int, group: int) -> tuple[Packed, np.ndarray]:
    """A weight as mlx packs it, read by us; and as mlx unpacks it."""
    values = mx.array(np.random.default_rng(size).normal(size=(rows, size)).astype(np.float32))
    words, scales, biases = mx.quantize(values, group_size=group, bits=bits)
    parts = (torch.from_numpy(np.array(part)) for part in (words, scales, biases))
    expected = mx.dequantize(words, scales, biases, group_size=group, bits=bits)
    return read_mlx(*parts, bits, "affine", torch.float32), np.array(expected)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64)])
def test_a_weight_is_what_mlx_unpacks(bits: int, group: int) -> None:
    weight, expected = quantized(5, 256, bits, group)
    assert weight.shape == (5, 256)
    assert weight.nbytes == 5 * 256 * bits // 8 + 2 * 4 * 5 * 256 // group
    np.testing.assert_allclose(dense(weight).numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(dense(weight[2:4]).numpy(), dense(weight)[2:4].numpy())


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_floats_of_mlx_are_what_mlx_unpacks(mode: str) -> None:
    values = mx.array(np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32))
    words, scales = mx.quantize(values, mode=mode)
    bits = 32 * words.shape[1] // 128
    parts = (torch.from_numpy(np.array(part)) for part in (words, scales))
    weight = read_mlx(*parts, None, bits, mode, torch.float32)
    expected = np.array(mx.dequantize(words, scales, mode=mode).astype(mx.float32))
    np.testing.assert_array_equal(dense(weight).numpy(), expected)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama", 4), ("qwen2", 8), ("qwen3_moe", 4), ("qwen3_5", 4), ("qwen3_5", 8)],
)
def test_a_quantized_checkpoint_has_the_logits_of_mlx_lm(name: str, bits: int) -> None:
    """Embedding, head, experts and projections are packed, and stay so."""
    path = as_mlx_saves(name, bits)
    decoder = load(path, dtype="float32").decoder
    assert isinstance(decoder.embed, Packed)
    np.testing.assert_allclose(torch_logits(decoder), mlx_logits(path), rtol=0, atol=5e-4)
    whole = load(checkpoint(name), dtype="float32").decoder
    assert decoder.nbytes < whole.nbytes * (0.6 if bits == 8 else 0.5)


def test_layers_of_other_bits_are_read_as_config_says() -> None:
    """And rows of one product that are packed in different ways are products of their own."""
    path = as_mlx_saves("qwen3", 4)
    config = json.loads((path / "config.json").read_text())
    layer = "model.layers.0.self_attn.v_proj"
    other = path.with_name(f"{path.name}-mixed")
    other.mkdir()
    weights = dict(mx.load(str(path / "model.safetensors")))
    full = mx.load(str(as_mlx_saves("qwen3") / "model.safetensors"))[f"{layer}.weight"]
    parts = mx.quantize(full, group_size=64, bits=8)
    weights |= {
        f"{layer}.{part}": value
        for part, value in zip(("weight", "scales", "biases"), parts, strict=True)
    }
    mx.save_safetensors(str(other / "model.safetensors"), weights)
    config["quantization"][layer] = {"group_size": 64, "bits": 8}
    (other / "config.json").write_text(json.dumps(config))
    decoder = load(other, dtype="float32").decoder
    assert isinstance(decoder.layers[0].mixer.qkv.weight, Stacked)
    np.testing.assert_allclose(torch_logits(decoder), mlx_logits(other), rtol=0, atol=5e-4)


def test_large_weights_are_unpacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, expected = quantized(37, 64, 4, 32)
    most: list[int] = []
    monkeypatch.setattr("pippin.backends.torch.models.packed.MOST_DENSE", 64 * 5)

    def counted(part: Packed) -> torch.Tensor:
        most.append(part.shape.numel())
        return dense(part)

    monkeypatch.setattr("pippin.backends.torch.models.packed.dense", counted)
    x, bias = torch.randn(3, 64), torch.randn(37)
    found = times(x, cat([weight, torch.ones(2, 64)]), torch.cat([bias, torch.zeros(2)]))
    assert max(most) <= 64 * 5 < MOST_DENSE
    torch.testing.assert_close(found[:, :37], x @ torch.from_numpy(expected).T + bias)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"bits": 3, "group_size": 64}, "3 bits"),
        ({"bits": 4, "group_size": 64, "model.layers.0.mlp": {"bits": 6}}, "6 bits"),
        ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, "nvfp4"),
    ],
)
def test_what_is_not_served_is_refused_by_name(quantization: dict[str, object], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        read_shape(TORCH_CONFIGS["qwen3"] | {"quantization": quantization})
