"""Serves decoder models: Hugging Face weights → tokens, by `generate` or over HTTP."""
