"""The cache on disk: entries in files, found by what they were computed from.

Lives here: what an entry is (entries), how it is named (chain), the verbs of a store (base), the
store in a directory (disk_store, over segments/), and how paths are put together again from
entries (rebuild).
Knows bytes, files and digests. Knows no arrays of mlx or torch, no tree and no scheduler.
"""
