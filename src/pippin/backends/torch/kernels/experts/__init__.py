"""Feed-forward layers of experts in Triton: routing, products by expert, weighted sums.

No atomics, and nothing that the host has to know: which experts a token goes to never leaves the
device, so a captured graph depends on the number of tokens alone. Knows no pools and no steps.
"""
