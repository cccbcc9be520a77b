"""Packed formats and mlx-lm's names on torch: whole checkpoints, against the weights they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import mlx.core as mx
import torch
from mlx_lm.utils import _transform_awq_weights
from safetensors import safe_open
from safetensors.torch import save_file

from cases import cases
from mlx_checkpoints import as_mlx_saves, mlx_logits, torch_logits
from packed_checkpoints import GROUP, Packing, awq, compressed, fp8, gptq, integers, words_of, write
from pippin.backends.torch.checkpoint import open_weights
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.formats import (
    find_weight,
    read_awq,
    read_compressed,
    read_fp8,
    read_gptq,
    read_mlx,
    read_mxfp4,
)
from pippin.backends.torch.load import load
from pippin.backends.torch.models.packed import MOST_DENSE, Packed, Stacked, cat, dense, times
from pippin.backends.torch.shapes import Quantization
from pippin.errors import LoadError
from torch_families import TORCH_CONFIGS, checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def schemes(bits: int, kind: str = "int", form: str = "pack-quantized") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "group_size": GROUP, "strategy": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def rows_of_fp8(weight: torch.Tensor) -> Packing:
    """As compressed-tensors stores it: one scale for each row."""
    tensors, means = fp8(weight, (1, weight.shape[1]))
    return Packing(
        {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, means
    )


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Packing]]] = {
    "gptq": (GPTQ, gptq),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, partial(gptq, bits=8)),
    "gptq, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(gptq, less_one=False)),
    "awq": (AWQ, awq),
    "fp8": (FP8, fp8),
    "fp8 in small blocks": (FP8 | {"weight_block_size": [32, 32]}, partial(fp8, block=(32, 32))),
    "compressed": (schemes(4), compressed),
    "compressed, with zeros": (schemes(4), partial(compressed, symmetric=False)),
    "compressed, 8 bits": (schemes(8), partial(compressed, bits=8, symmetric=False)),
    "compressed, fp8": (schemes(8, "float", "float-quantized"), rows_of_fp8),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_checkpoint_computes_what_its_weights_mean(name: str, tmp_path: Path) -> None:
    packed, plain = (
        load(path, dtype="float32").decoder for path in write(tmp_path, *FORMATS[name])
    )
    assert isinstance(packed.layers[0].mixer.qkv.weight, Packed)
    assert isinstance(packed.embed, torch.Tensor)  # which is dense in the checkpoint
    assert packed.nbytes < plain.nbytes * 0.75
    np.testing.assert_allclose(torch_logits(packed), torch_logits(plain), rtol=0, atol=1e-4)


def test_awq_is_what_mlx_lm_reads() -> None:
    tensors, means = awq(drawn(16, 64))
    stored = {f"x.{name}": mx.array(tensor.numpy()) for name, tensor in tensors.items()}
    stored["x.qweight"], stored["x.qzeros"] = (
        stored[f"x.{name}"].view(mx.uint32) for name in ("qweight", "qzeros")
    )
    theirs, _ = _transform_awq_weights(stored, {"bits": 4, "group_size": GROUP})
    parts = (theirs[f"x.{name}"] for name in ("weight", "scales", "biases"))
    expected = np.array(mx.dequantize(*parts, group_size=GROUP, bits=4).astype(mx.float32))
    found = dense(read_awq(*tensors.values(), torch.float32)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-3)  # it rounds to half precision
    np.testing.assert_allclose(found, means.numpy(), rtol=0, atol=1e-6)


def test_mxfp4_of_gpt_oss_is_what_mlx_reads() -> None:
    """[experts, rows, groups, 16], every number and a wide range of scales."""
    blocks = torch.randint(0, 256, (2, 5, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 5, 3), dtype=torch.uint8)
    words = mx.array(blocks.flatten(2).numpy()).view(mx.uint32)
    expected = mx.dequantize(words, mx.array(scales.numpy()), group_size=32, bits=4, mode="mxfp4")
    found = dense(read_mxfp4(blocks, scales, torch.float32)).numpy()
    np.testing.assert_array_equal(found, np.array(expected.astype(mx.float32)))


def test_groups_in_another_order_are_refused_by_name() -> None:
    tensors, _ = gptq(drawn(8, 64))
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    with pytest.raises(LoadError, match=r"layer\.q_proj .*desc_act"):
        read_gptq(*tensors.values(), 4, less_one=True, dtype=torch.float32, name="layer.q_proj")


def test_offsets_are_exact_and_no_longer_than_they_need_be() -> None:
    """Of symmetric numbers they are as short as the scales; others half precision would round."""
    codes, scales, zeros = integers(drawn(8, 64), 4)
    words = words_of(codes, 4, 1)
    short = read_compressed(words, scales, None, 64, 4, torch.float32)
    exact = read_compressed(words, scales, words_of(zeros, 4, 0), 64, 4, torch.float32)
    assert short.offsets is not None
    assert short.offsets.dtype == torch.float16
    assert exact.offsets is not None
    assert exact.offsets.dtype == torch.float32


def test_groups_that_kernels_do_not_take_are_refused_by_name() -> None:
    weight, scale = torch.zeros(4, 48).to(torch.float8_e4m3fn), torch.ones(1, 1)
    with pytest.raises(LoadError, match=r"x has rows of 48 numbers in blocks of 128"):
        read_fp8(weight, scale, (128, 128), torch.float32, "x")
    with pytest.raises(LoadError, match="float8_e5m2"):
        read_fp8(weight.view(torch.float8_e5m2), scale, None, torch.float32, "x")


@cases(
    ("key", "quantization", "named"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ("quantization_config", GPTQ | {"bits": 3}, "3 bits"),
        ("quantization_config", AWQ | {"version": "gemv"}, "gemv"),
        ("quantization_config", schemes(4, "float", "nvfp4-pack-quantized"), "nvfp4-pack-quantize"),
        ("quantization_config", schemes(2), "2 bits"),
        ("quantization_config", schemes(8, "int", "naive-quantized"), "type int"),
        ("quantization_config", "fp8", "not an object"),
        ("quantization", {"bits": 3, "group_size": 64}, "3 bits"),
        (
            "quantization",
            {"bits": 4, "group_size": 64, "model.layers.0.mlp": {"bits": 6}},
            "6 bits",
        ),
        ("quantization", {"bits": 4, "group_size": 16, "mode": "nvfp4"}, "nvfp4"),
    ],
)
def test_what_is_not_served_is_refused_by_name(key: str, quantization: object, named: str) -> None:
    with pytest.raises(LoadError, match=named):
        read_shape(TORCH_CONFIGS["qwen3"] | {key: quantization})


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int32, torch.uint8])
def test_what_is_packed_in_a_way_that_is_not_read_is_never_taken_as_dense(
    tmp_path: Path, stored: torch.dtype
) -> None:
    """Of a format that is served, with other scales: here one of the whole weight."""
    tensors = {"q.weight": torch.ones(4, 32).to(stored), "q.weight_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        open_weights(tmp_path, torch.device("cpu"), "model.") as weights,
        pytest.raises(LoadError, match=r"q\.weight is stored as .*, without scales"),
    ):
        find_weight(weights, Quantization("fp8", FP8), "q", torch.float32)


def test_a_file_of_weights_that_was_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(64, 64)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with (
        pytest.raises(LoadError, match=r"model\.safetensors cannot be read, perhaps its download"),
        open_weights(tmp_path, torch.device("cpu"), ""),
    ):
        pass


NAMES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")


@cases("name", NAMES)
def test_a_checkpoint_that_mlx_lm_saved_has_the_logits_of_mlx_lm(name: str) -> None:
    path = as_mlx_saves(name)
    found = torch_logits(load(path, dtype="float32").decoder)
    np.testing.assert_allclose(found, mlx_logits(path), rtol=0, atol=2e-4)
    original = torch_logits(load(checkpoint(name), dtype="float32").decoder)
    np.testing.assert_allclose(found, original, rtol=0, atol=1e-5)


def test_mlx_lm_saves_other_names_and_layouts() -> None:
    """What the test above is about: were they the usual ones, it would show nothing."""
    with safe_open(as_mlx_saves("qwen3_5_moe") / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        conv = file.get_slice("language_model.model.layers.0.linear_attn.conv1d.weight")
        assert conv.get_shape()[-1] == 1
    assert "language_model.lm_head.weight" in names
    assert "language_model.model.layers.0.mlp.switch_mlp.up_proj.weight" in names


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
