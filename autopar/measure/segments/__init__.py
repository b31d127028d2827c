"""Segments of a model: from a step to a plan made of measured parts.

Segments are cut out of the step, compiled and timed with their leading combinations of strategies,
and combined by an exact search over the measured times.

    passes              the three passes below, and their files
    analyse             a step → segments, each with its leading combinations (`cut`, `combine`)
    profile             combinations → times on devices (`run`)
    search_segments     times → a plan
"""
