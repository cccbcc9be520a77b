"""Several models in memory for few: which engines run, and which requests wait."""
