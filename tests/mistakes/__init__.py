"""Mistakes that users make, and what autopar tells them."""
