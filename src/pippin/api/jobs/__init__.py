"""A request on its way through an engine: made ready, run, replied to, logged."""
