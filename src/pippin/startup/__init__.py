"""Before a model is loaded: its files, what a config leaves open, a server that already listens.

Knows no requests and no arrays.
"""
