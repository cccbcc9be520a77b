"""What mlx lacks on CPUs: a fast BLAS, operations. Knows no requests."""
