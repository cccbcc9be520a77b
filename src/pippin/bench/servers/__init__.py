"""The servers that are measured: how each is started and ended. Knows no requests."""
