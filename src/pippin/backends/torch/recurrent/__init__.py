"""Gated DeltaNet in plain torch operations: many tokens in blocks, and one token."""
