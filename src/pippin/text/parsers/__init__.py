"""Finds reasoning and tool calls in replies. Knows no tokens and no HTTP.

Formats of calls lie in `calls/`; `formats.py` lists them and chooses one by the marks in a model's
chat template.
"""
