"""What a step contains: new requests, chunks of prompts, tokens of replies, grammars' masks.

Knows requests and what they hold; no device, no clock, and nothing of steps in flight.
"""
