"""Endpoints that are no dialect of generating text. Each file knows its own fields and replies.

None knows the scheduler or another endpoint.
"""
