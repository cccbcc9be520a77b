"""HTTP itself: who may come in, how much and how slowly, ids, logs, streams and error bodies.

Written once for every dialect of requests and replies. Knows no field of any request.
"""
