"""Segments of a step: analysed, profiled on real devices, searched."""
