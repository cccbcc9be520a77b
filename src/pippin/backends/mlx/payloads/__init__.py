"""What passes between slots and the prefix cache, as payloads."""
