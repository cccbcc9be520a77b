"""Models in the Hugging Face hub's cache: downloaded, listed, deleted. Knows no layout of them."""
