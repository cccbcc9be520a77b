"""Gated DeltaNet and Mamba-2 as products over blocks of 64 tokens, and which code runs them.

Knows arrays and the functions of mlx-lm that these stand in for; knows no requests and no rows.
"""
