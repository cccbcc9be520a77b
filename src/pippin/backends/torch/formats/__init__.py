"""Packed weights as checkpoints store them, read into the one form that products read."""
