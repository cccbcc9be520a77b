"""What passes between slots and the prefix cache, as payloads. Knows no tree and no forward."""
