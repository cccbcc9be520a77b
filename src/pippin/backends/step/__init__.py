"""A launched step, whatever computes it: slots, sampling, results, fingerprints, drafts' texts."""
