"""Lowering: from the sharding of a graph to an annotated function."""
