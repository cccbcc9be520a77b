"""A launched step: sampling, what it will tell, tokens by slot. Knows no model."""
