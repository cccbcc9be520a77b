"""What the engine does, told to whoever watches: steps, requests, the tree, memory.

Lives in the engine's process. Knows the scheduler and the cache, which know it only as an observer
that is None while nobody watches; knows no HTTP, no text, and not who the watchers are.
"""
