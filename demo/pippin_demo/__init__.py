"""stories-hybrid-20m, a model for `pippin serve`. Holds files, and no code."""
