"""OpenAI's Responses API. `request.py` reads it, `items.py` its conversation, `reply.py` answers.

Replies are not stored: a client sends the conversation with each request.
"""
