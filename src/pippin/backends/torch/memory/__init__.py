"""What a backend takes of a device's memory: measured, divided, kept to."""
