"""Recurrent layers, Gated DeltaNet and Mamba-2, as kernels: a step, or blocks of 64 tokens."""
