"""Connections between a prefill engine and decode engines.

connection     messages, limits on them, keys; how a connection is opened; the thread of them all
peer_listener  the prefill engine's end: accepts, and sends what was asked for
peer_links     the decode engine's end: connects, asks, and receives
"""
