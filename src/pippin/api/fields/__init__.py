"""Tables of the fields of requests."""
