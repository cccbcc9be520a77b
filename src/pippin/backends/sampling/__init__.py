"""What sampling means on every backend, and its parameters in numpy. Knows no other arrays."""
