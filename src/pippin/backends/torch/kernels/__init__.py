"""Triton kernels of a decode step and of a prompt, each equal to plain operations elsewhere.

They run on CUDA, and one by one under TRITON_INTERPRET=1 on a CPU, where tests compare them.
"""
