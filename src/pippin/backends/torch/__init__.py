"""The torch backend: the same engine for CUDA and CPUs, on pools that are written in place.

    models/     weights and plain operations of the families that are served
    pools/      one memory for KV cells and states, and what each slot holds of it
    attention/  over cells; recurrent/ Gated DeltaNet: plain operations
    kernels/    the same in Triton, for GPUs
    step/       a launched step: index arrays, sampling, future tokens, what it will tell

Knows no scheduler and no tree. Nothing here imports mlx.
"""
