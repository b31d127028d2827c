"""Measured plans: profiles of machines, timed plans and segments, ranking, proof by compiling."""
