"""Runs models through MLX: Metal, CUDA and CPU."""

from pippin.backends.mlx.cpu.blas import load_fast_blas

load_fast_blas()  # before anything here imports mlx
