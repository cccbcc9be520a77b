"""Attention over cells of the KV pool. Knows no projections, no rotation and no gates."""
