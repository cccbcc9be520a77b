"""The Batch API: files, batches and what runs their lines."""
