"""Packed formats of other programs on torch: whole checkpoints, against the weights they mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cases import cases

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch
from mlx_lm.utils import _transform_awq_weights
from safetensors.torch import save_file

from mlx_checkpoints import torch_logits
from packed_checkpoints import GROUP, Packing, awq, compressed, fp8, gptq, integers, words_of, write
from pippin.backends.torch.checkpoint import open_weights
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.formats.find import find_weight
from pippin.backends.torch.formats.floats import read_fp8, read_mxfp4
from pippin.backends.torch.formats.integers import read_awq, read_compressed, read_gptq
from pippin.backends.torch.formats.quantization import Quantization
from pippin.backends.torch.load import load
from pippin.backends.torch.models.packed import Packed, dense
from pippin.errors import LoadError
from torch_families import TORCH_CONFIGS

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
    ("quantization", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        (GPTQ | {"bits": 3}, "3 bits"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (schemes(4, "float", "nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (schemes(2), "2 bits"),
        (schemes(8, "int", "naive-quantized"), "type int"),
        ("fp8", "not an object"),
    ],
)
def test_what_is_not_served_is_refused_by_name(quantization: object, named: str) -> None:
    with pytest.raises(LoadError, match=named):
        read_shape(TORCH_CONFIGS["qwen3"] | {"quantization_config": quantization})


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
