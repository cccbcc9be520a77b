"""Benchmarks over the public API and HTTP, a module a command. Knows no scheduler and no cache.

`in_process/` runs an engine here; `served/` and `churn/` measure servers from outside, of which
`client/` and `servers/` are the two ends. `results/` is what comes out of all of them.
"""
