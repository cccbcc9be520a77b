"""The offline API: `LLM` and `AsyncLLM`, an engine in a program's own process."""
