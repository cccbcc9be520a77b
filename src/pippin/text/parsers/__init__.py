"""Finds reasoning and tool calls in replies: one file a format. Knows no tokens and no HTTP.

`formats.py` lists the formats and chooses one by the marks in a model's chat template.
"""
