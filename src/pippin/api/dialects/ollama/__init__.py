"""Ollama's API: requests and replies."""
