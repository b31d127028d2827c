"""The zoo of `tests/zoo` at real sizes: planned for 8 and 64 H100s, in one table."""
