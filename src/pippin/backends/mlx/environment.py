"""What mlx reads from its environment, set before it looks. Imports no mlx, knows no models.

mlx asks once in a process: for TF32 at its first product, for the limits of command buffers when it
first uses the device. What the user has set stays as it is.

    MLX_ENABLE_TF32          GPUs may round the factors of float32 products to ten bits, which turns
                             an error of 1e-6 in a chunked recurrence into 1e-3. Off with
                             --deterministic and in tests; else it is left to mlx, which has it on
    MLX_USE_CUDA_GRAPHS      mlx captures twenty operations at a time as a CUDA graph and looks for
                             one of the same form to update. While requests come and go few are: 24
                             at a time on an H200 got 1,116 tokens a second with graphs, 1,461
                             without, and p99 gaps of 117 and 56 ms (one run of 8 s each)
    MLX_MAX_OPS_PER_BUFFER   operations, and megabytes that they touch, which are handed to a GPU at
    MLX_MAX_MB_PER_BUFFER    a time: mlx chooses by the device, and a few have done better with more
"""

from __future__ import annotations

import os

TF32 = "MLX_ENABLE_TF32"
CUDA_GRAPHS = "MLX_USE_CUDA_GRAPHS"
BUFFER_LIMITS = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")


def prepare(*, deterministic: bool, buffer_limit: int | None) -> None:
    """For an engine with these options, and for everything that checks what it computes."""
    os.environ.setdefault(CUDA_GRAPHS, "0")
    if deterministic:
        os.environ.setdefault(TF32, "0")
    if buffer_limit is not None:
        for name in BUFFER_LIMITS:
            os.environ.setdefault(name, str(buffer_limit))


def products_are_exact() -> bool:
    """Whether GPUs compute float32 products without TF32. CPUs have none."""
    return os.environ.get(TF32) == "0"
