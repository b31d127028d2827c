"""A module run as a script that ends with the process that started it.

python -m benchmarks.zoo.ending PARENT MODULE ARGUMENTS…

A case of a benchmark runs in a session of its own, so neither Ctrl-C nor `timeout` reaches it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

_LOOK_EVERY_S = 0.5


def end_with(parent: int) -> None:
    """Ends this process and those that it started, once `parent` has ended."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
