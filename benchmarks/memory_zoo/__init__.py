"""Predicted peak memory against XLA's, over models and kinds of plans."""
