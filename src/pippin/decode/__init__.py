"""What constrains the next token: grammars, over llguidance."""
