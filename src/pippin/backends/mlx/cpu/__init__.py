"""What mlx lacks on CPUs: a fast BLAS, kept buffers, operations. Knows no requests."""
