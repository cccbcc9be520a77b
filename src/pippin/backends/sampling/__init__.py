"""What sampling means on every backend, and its parameters in numpy."""
