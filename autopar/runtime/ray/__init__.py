"""Worker processes on a Ray cluster: placement, control and liveness."""
