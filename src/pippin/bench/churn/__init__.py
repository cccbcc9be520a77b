"""Requests that come and go: the load, and where a server's time went under it. Knows no model."""
