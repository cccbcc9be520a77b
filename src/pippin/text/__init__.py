"""Text to tokens and back. Knows no HTTP and no model."""
