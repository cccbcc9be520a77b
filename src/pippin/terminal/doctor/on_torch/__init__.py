"""Sections of machines that compute with torch. Imports no mlx."""
