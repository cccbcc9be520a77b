"""Rows that verify drafts, before their forward: as index arrays, and as the words of a graph."""
