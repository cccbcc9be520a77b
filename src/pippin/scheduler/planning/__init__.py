"""What goes into a step: who starts, chunks of prompts, tokens of replies, what grammars allow.

Knows requests and what they hold; no device, no clock, and nothing of steps in flight.
"""
