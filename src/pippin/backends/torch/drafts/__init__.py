"""The backend's own drafter: an MTP head, what it remembers of rows, and its operations."""
