"""Entries: payloads of the prefix cache as bytes, named by the tokens they were computed from.

entry        what an entry is: a run of tokens, a component, named arrays
entry_store  the verbs of a store of entries
chain        how a sequence of tokens is named
entry_index  which entries a store has, and when they were used
blocks       payloads as blocks that threads read, copy and verify
rebuild      paths from the root, put together from entries

Knows bytes and digests. Knows no tree, no files and no arrays of a backend.
"""
