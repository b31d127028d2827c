"""Training: data loading, restoring of state, and a training loop that survives lost workers."""
