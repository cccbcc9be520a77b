"""The byte budget: what rows and captures claim of it, and what happens when it is short.

Knows no order of requests and no device.
"""
