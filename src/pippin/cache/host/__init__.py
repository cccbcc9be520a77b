"""Entries in the host's memory, for devices that have a memory of their own.

The verbs are those of every store (`cache/disk/base.py`). Knows no tree and no device: whoever
makes a store gives it memory, which is pinned where a device is to copy from it.
"""
