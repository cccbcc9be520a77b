"""From the JSON of a request to a neutral request. Knows no engine and no tokens.

What dialects have in common is read and checked here: inner code does not check user input again.
"""
