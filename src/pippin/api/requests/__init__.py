"""From the JSON of a request to a neutral request.

What dialects have in common is read and checked here: inner code does not check user input again.
"""
