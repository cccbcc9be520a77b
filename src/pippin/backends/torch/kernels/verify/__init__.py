"""Steps that verify drafts, as kernels: what tokens look up, their forward, which are accepted."""
