"""What constrains the next token: grammars, over llguidance. Knows no model and no requests."""
