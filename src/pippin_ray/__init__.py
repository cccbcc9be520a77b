"""Several engines on Ray Serve: what `pippin[ray]` is for. Only `application.py` imports Ray."""
