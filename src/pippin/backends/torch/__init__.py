"""The torch backend: the same engine for CUDA and CPUs, on pools that are written in place.

    models/   weights and layers of the families that are served
    pools/    one memory for KV cells and states, and what each slot holds of it
    plain/    forwards over the pools in plain operations
    kernels/  the same in Triton, for GPUs
    graphs/   steps of kernels, captured and replayed
    step/     a launched step: index arrays, sampling, future tokens, results

Knows no scheduler and no tree. Nothing here imports mlx.
"""
