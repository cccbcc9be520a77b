"""What constrains or predicts the next token. Knows no model."""
