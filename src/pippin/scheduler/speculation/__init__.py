"""Several tokens a step: who drafts, and how many tokens. Knows no device and no bytes."""
