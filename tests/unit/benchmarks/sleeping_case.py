"""A case of a benchmark that takes long: writes its process's id, sleeps, and prints a row.

python -m tests.unit.benchmarks.sleeping_case FILE SECONDS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)
    time.sleep(float(sys.argv[2]))
    print(json.dumps({"slept": sys.argv[2]}))
