"""Segments: the files that entries lie in, as a log under a ceiling of bytes.

Lives here: the bytes of both files of a segment (format), one segment, the log of them, which
entries there are (catalog), what a crash or damage left (recovery), and what makes room (reclaim).
Knows files and where they lie. Knows no tree, and nothing of who asks for entries.
"""
