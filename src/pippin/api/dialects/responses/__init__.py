"""OpenAI's Responses API. `request.py` reads it, `items.py` its conversation, `reply.py` answers.

`store.py` keeps responses, so that a later request can go on from one.
"""
