"""Connections between a prefill engine and decode engines. Knows sockets; knows no steps.

agreement      what both ends must have in common, and the proof of a shared secret
wire_frames    the messages, and limits on them
peer_address   tcp:// and tls:// addresses, and which of them are accepted
connection     frames and payloads on one connection
shared_memory  payloads between engines on one machine
peer_listener  the prefill engine's end: accepts, and sends what was asked for
peer_links     the decode engine's end: connects, asks, and receives
wire_thread    the thread in which all of it runs
"""
