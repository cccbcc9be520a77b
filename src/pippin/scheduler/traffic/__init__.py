"""What flows between memory and the tiers below it while requests run: loads, and spills.

Knows steps, clocks and who waits; what to write and what to read is for `cache/tiers` to say.
"""
