"""Numbers survive the way from torch to mlx and back, whatever their type and however they lie."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from pippin.bridge import _AS_BYTES, _BY_TORCH, mlx_to_torch, torch_to_mlx


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: torch.dtype, size: int = 64) -> torch.Tensor:
    """Every bit at random: numbers that are none, infinite ones and the smallest are among them."""
    if dtype is torch.bool:
        return torch.arange(size) % 3 == 0
    raw = np.random.default_rng(0).bytes(size * dtype.itemsize)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", _BY_TORCH, ids=str)
def test_every_type_arrives_bit_by_bit(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype)
    array = torch_to_mlx(tensor)
    assert array.dtype == _BY_TORCH[dtype]
    back = mlx_to_torch(array)
    assert back.dtype == dtype
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", _AS_BYTES, ids=str)
def test_what_mlx_lacks_travels_as_bytes(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype)
    array = torch_to_mlx(tensor)
    assert array.dtype == mx.uint8
    assert bits(mlx_to_torch(array, view=dtype)) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex128), torch.zeros(2).to_sparse()],
    ids=["complex128", "sparse"],
)
def test_what_has_no_counterpart_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="no counterpart"):
        torch_to_mlx(tensor)


WHOLE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        WHOLE,
        WHOLE.permute(2, 0, 1),
        WHOLE[:, ::2, 1:],
        WHOLE[1],
        WHOLE[:0],
        torch.tensor(3.0),
        torch.arange(3.0).expand(2, 3),
        torch.ones(2, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
    ],
)
def test_a_tensor_may_lie_as_it_likes(tensor: torch.Tensor) -> None:
    array = torch_to_mlx(tensor)
    assert array.shape == tuple(tensor.shape)
    assert array.tolist() == tensor.tolist()


@pytest.mark.parametrize(
    "slices",
    [
        np.s_[:],
        np.s_[::-1],
        np.s_[:, ::-1, ::2],
        np.s_[0:0],
        np.s_[1, 2, 3],
        np.s_[..., None],
    ],
)
def test_an_array_may_lie_as_it_likes(slices: tuple[slice, ...]) -> None:
    array = mx.arange(24).reshape(2, 3, 4)[slices]
    for lying in (array, array.T, mx.broadcast_to(array, (2, *array.shape))):
        tensor = mlx_to_torch(lying)
        assert tuple(tensor.shape) == lying.shape
        assert tensor.tolist() == lying.tolist()


def test_a_tensor_is_a_view_of_its_array_and_keeps_it_alive() -> None:
    array = mx.zeros(4096) + 7.0
    tensor = mlx_to_torch(array)
    tensor[1] = 5.0
    assert array[1].item() == 5.0
    del array
    gc.collect()
    mx.eval([mx.ones(4096) * n for n in range(20)])  # would be given the same memory
    assert tensor.unique().tolist() == [5.0, 7.0]


def test_an_array_does_not_change_with_its_tensor() -> None:
    tensor = torch.ones(4)
    array = torch_to_mlx(tensor)
    tensor[0] = 9.0
    assert array.tolist() == [1.0] * 4


def test_an_array_that_is_not_computed_yet_is_waited_for() -> None:
    assert mlx_to_torch(mx.arange(4) * 2).tolist() == [0, 2, 4, 6]
