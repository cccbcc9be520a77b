"""Whether an engine has drafts, and by which model: decided before anything is loaded."""
