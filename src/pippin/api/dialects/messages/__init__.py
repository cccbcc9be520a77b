"""Anthropic's Messages API: what is asked (`request.py`, `conversation.py`) and `reply.py`."""
