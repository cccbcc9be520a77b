"""Decides what each step computes. Knows no mlx, no torch and no HTTP."""
