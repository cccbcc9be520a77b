"""Families whose config.json is not read as Llama's is, one file each."""
