"""Steps that verify drafts: rows of their own length each, sampling behind drafts, acceptance."""
