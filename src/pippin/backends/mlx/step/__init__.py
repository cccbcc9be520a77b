"""A launched step: sampling, its results, tokens by slot."""
