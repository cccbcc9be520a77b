"""What a model sees of decode rows in one step, and how its layers attend."""
