"""Layers of experts on Metal, while tokens are few."""
