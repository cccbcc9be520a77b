"""Products with packed weights in Triton: a step reads their few bits, not what they stand for."""
