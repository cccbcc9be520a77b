"""What running requests hold, and one token of each of them."""
