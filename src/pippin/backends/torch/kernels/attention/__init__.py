"""Attention over cells as kernels: a step, or blocks of prompts' chunks; plain or latent."""
