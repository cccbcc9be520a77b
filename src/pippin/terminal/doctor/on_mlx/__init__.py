"""Sections of machines that compute with mlx."""
