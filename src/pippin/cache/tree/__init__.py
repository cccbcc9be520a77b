"""The radix tree of the prefix cache: nodes, their payloads, locks and eviction order."""
