"""Rewrites, `Program` → `Program`: micro-batches, recomputation, scans unrolled, layers, stages."""
