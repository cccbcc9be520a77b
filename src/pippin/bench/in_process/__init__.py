"""What an engine does in this process, through `LLM` alone. Knows no HTTP.

`one_batch.py`, `growth.py`, `overlap.py`, `grammar.py` and `backends.py` are commands; the rest is
what they time and compare with.
"""
