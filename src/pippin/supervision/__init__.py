"""Keeps an engine process running behind the server."""
