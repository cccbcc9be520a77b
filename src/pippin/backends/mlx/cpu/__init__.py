"""What mlx lacks on CPUs: a fast BLAS, vector math, kept buffers, kernels. Knows no requests."""
