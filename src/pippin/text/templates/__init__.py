"""Chat templates, rendered in a sandbox from messages in the shape they take. Knows no engine."""
