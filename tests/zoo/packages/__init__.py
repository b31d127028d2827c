"""Train steps built from public packages, unmodified; a module per family."""
