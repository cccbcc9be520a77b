"""Ollama's routes: replies, embeddings, models."""
