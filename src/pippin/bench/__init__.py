"""Benchmarks over the public API and HTTP."""
