"""A launched step: what it reads, samples and will tell. Knows no model."""
