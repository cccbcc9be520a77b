"""What the served families compute, in plain torch operations."""
