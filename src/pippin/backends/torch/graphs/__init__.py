"""Work that is captured as CUDA graphs and replayed: decode steps and chunks of prompts."""
