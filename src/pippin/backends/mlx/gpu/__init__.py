"""Fewer launches a step: products that share an input, packed attention."""
