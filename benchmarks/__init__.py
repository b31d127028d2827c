"""Benchmarks. Each module is a script: `python -m benchmarks.NAME --help`."""
