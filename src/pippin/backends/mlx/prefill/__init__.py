"""Prompts in the making: which chunks share a forward, and the forward."""
