"""Entries on disk: the store in a directory (disk_store, over segments/), what a model is as a few
bytes (fingerprint), and a look at a directory from outside (inspection).

Knows bytes, files and digests. Knows no arrays of mlx or torch, no tree and no scheduler.
"""
