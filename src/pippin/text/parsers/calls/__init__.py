"""How each family of models writes tool calls: one file a format. Knows no chat templates."""
