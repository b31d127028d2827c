"""Benchmarks. Each module with a `main` is a script: `python -m benchmarks.NAME --help`.

They measure planning, so plans of earlier runs are not read: the plan cache is off by default.
"""

import os

os.environ.setdefault("AUTOPAR_CACHE_DIR", "")
