"""Segments: the files that entries lie in, as a log under a limit of bytes.

Lives here: the bytes of every file (format), one segment, the log of them, which entries there are
(catalog), and what a crash or damage left (recovery). Knows files; knows no tree.
"""
