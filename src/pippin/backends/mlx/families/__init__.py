"""What is special about single families: those that are refused, and code in place of mlx-lm's."""
