"""What the engine does, as events: steps, requests, the tree, memory.

Runs in the engine's process. Knows the scheduler and the cache, which know it only as an observer
that is None while no event is wanted; knows no HTTP, no text and no watchers.
"""
