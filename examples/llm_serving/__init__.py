"""Serving of decoder models: a folder of Hugging Face weights → tokens, by `generate` or over HTTP."""
