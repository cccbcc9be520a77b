"""`pippin doctor`: whether this machine computes correct results, and how fast. Asserts no time.

A section is a function that yields findings, in a file of its own; `sections.py` lists them.
"""

from pippin.terminal.doctor.run import run_doctor

__all__ = ["run_doctor"]
