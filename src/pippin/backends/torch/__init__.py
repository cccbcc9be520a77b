"""The torch backend: the same engine for CUDA and CPUs, on pools that are written in place.

    forwards.py  the rows of a plan, in as few forwards as there can be
    models/      weights and layers of the families that are served
    pools/       one memory for KV cells and states, and what each slot holds of it
    plain/       a step over the pools in plain operations
    kernels/     the same in Triton, for GPUs
    graphs/      steps of kernels, captured and replayed
    step/        a step's rows: what they take, their words, how they sample

Knows no scheduler and no tree. Nothing here imports mlx.
"""
