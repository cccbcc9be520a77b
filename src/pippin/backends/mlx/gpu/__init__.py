"""Fewer launches a step: products that share an input, and CUDA kernels. Knows no requests."""
