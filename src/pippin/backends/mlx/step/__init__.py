"""A launched step: sampling, its results, tokens by slot. Knows no model."""
