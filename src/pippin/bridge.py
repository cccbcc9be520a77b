"""Arrays from torch to mlx and back, number for number. Knows no models.

    mlx_to_torch    shares memory where torch can address it; the tensor keeps the array alive
    torch_to_mlx    a copy: mlx owns what it computes with, and its arrays never change

Every type has one counterpart or is refused by name; nothing is narrowed on the way, as either
library would do by itself (float64 becomes float32, complex128 complex64). Types of eight bits that
mlx does not have travel as uint8; `mlx_to_torch(array, view=...)` reads them back.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch

_BY_TORCH = {
    torch.bool: mx.bool_,
    torch.uint8: mx.uint8,
    torch.uint16: mx.uint16,
    torch.uint32: mx.uint32,
    torch.uint64: mx.uint64,
    torch.int8: mx.int8,
    torch.int16: mx.int16,
    torch.int32: mx.int32,
    torch.int64: mx.int64,
    torch.float16: mx.float16,
    torch.bfloat16: mx.bfloat16,
    torch.float32: mx.float32,
    torch.float64: mx.float64,
    torch.complex64: mx.complex64,
}
_AS_BYTES = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


def mlx_to_torch(array: mx.array, *, view: torch.dtype | None = None) -> torch.Tensor:
    """The array's numbers; waits until they are there. Whoever writes into the tensor writes into
    the array. `view`: what its bits are, of a type of the same size."""
    if array.dtype == mx.bfloat16:  # which numpy does not know
        return mlx_to_torch(array.view(mx.uint16), view=view or torch.bfloat16)
    mx.eval(array)
    # By the buffer protocol: torch refuses what DLPack says of a slice (a byte offset), and the
    # process dies of a negative stride.
    shared = np.asarray(memoryview(array))  # type: ignore[arg-type]  # it is a buffer
    shared = shared.view(f"{shared.dtype.kind}{shared.dtype.itemsize}")  # not C's long long
    if any(stride < 0 for stride in shared.strides):
        shared = shared.copy()
    tensor: torch.Tensor = torch.from_numpy(shared)
    return tensor if view is None else tensor.view(view)


def torch_to_mlx(tensor: torch.Tensor) -> mx.array:
    """The tensor's numbers, from whatever device they are on."""
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        raise TypeError(f"{tensor.layout} has no counterpart in mlx")
    if tensor.dtype in _AS_BYTES:
        tensor = tensor.view(torch.uint8)
    if tensor.dtype not in _BY_TORCH:
        raise TypeError(f"{tensor.dtype} has no counterpart in mlx")
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype == torch.float64:  # mlx would take it for float32
        bits = mx.array(tensor.contiguous().view(torch.int64))
        return mx.view(bits, mx.float64, stream=mx.cpu)
    return mx.array(tensor)
