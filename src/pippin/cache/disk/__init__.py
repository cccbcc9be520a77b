"""Entries on disk: the store in a directory, and what a model is as a few bytes."""
