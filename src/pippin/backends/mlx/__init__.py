"""Runs models through MLX: Metal, CUDA and CPU."""

from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.backends.mlx.mlx_lm_package import put_in_place

load_fast_blas()  # before anything here imports mlx
put_in_place()  # before anything here imports mlx_lm
