"""What runs a model. Backends meet one contract; none inherits from another."""
