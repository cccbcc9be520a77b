"""Anthropic's Messages API: requests, their conversations, and replies."""
