"""Benchmarks. Each module with a `main` is a script: `python -m benchmarks.NAME --help`."""
