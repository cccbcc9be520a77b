"""What mlx lacks on CPUs: a fast BLAS, operations."""
