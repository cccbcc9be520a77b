"""Operations of ours in mlx's graphs on Linux CPUs, in C++. Knows no model but what a layer is.

What mlx has as one kernel on a GPU is a dozen operations on a CPU: a norm, a rotation. Each costs
the host some microseconds, and a chunk of a prompt had two thousand of them.
"""
