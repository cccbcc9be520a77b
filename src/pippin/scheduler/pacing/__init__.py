"""How much of a step prompts may take, from what steps took. Knows no requests."""
