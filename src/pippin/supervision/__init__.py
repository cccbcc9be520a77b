"""Keeps an engine process running behind the server. Knows no HTTP, no text and no arrays."""
