"""Finds reasoning and tool calls in replies."""
