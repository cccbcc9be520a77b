"""What a reply must look like, as a grammar of it: content, calls, or either."""
