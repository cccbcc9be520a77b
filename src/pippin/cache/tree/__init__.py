"""The radix tree of the prefix cache: nodes, their payloads, locks and eviction order.

Knows tokens and opaque payloads. Knows no requests (`prefix_cache.py`), no tiers, no arrays.
"""
