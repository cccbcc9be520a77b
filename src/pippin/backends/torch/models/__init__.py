"""What the served families compute, in plain torch operations. Knows no slots and no plans."""
