"""What an engine does, as events for watchers and traces; nothing is recorded without them."""
