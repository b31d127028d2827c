"""Serving of decoder models: Hugging Face weights in, tokens out, by `generate` or over HTTP."""
