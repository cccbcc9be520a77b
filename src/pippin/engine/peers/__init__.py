"""Connections between a prefill engine and decode engines.

wire_frames    the messages, limits on them, and the keys
connection     frames and payloads on one connection, how it is opened, and the thread of them all
shared_memory  payloads between engines on one machine
peer_listener  the prefill engine's end: accepts, and sends what was asked for
peer_links     the decode engine's end: connects, asks, and receives
"""
