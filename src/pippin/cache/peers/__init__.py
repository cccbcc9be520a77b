"""Hand-over: one engine computes a prompt, another one decodes. Knows entries, no sockets.

wanted          a prompt that a decode engine asked for, and the entries that may arrive of it
peer_store      what prefill engines have sent, until it is loaded: a store that announces arrivals
outgoing_store  a store that sends what is written to it
"""
