"""A launched step: what it reads, samples and returns."""
