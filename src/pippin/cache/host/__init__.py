"""Entries in the host's memory, for devices that have a memory of their own.

The verbs are those of every store (`cache/entries/entry_store.py`). Knows no tree and no device:
the caller gives it memory, which is pinned where a device copies from it.
"""
