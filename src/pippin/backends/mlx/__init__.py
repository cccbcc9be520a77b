"""Runs models through MLX: Metal, CUDA and CPU."""
