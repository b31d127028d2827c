"""How long `import autopar` takes: medians over fresh processes, relative to `import jax`.

python -m benchmarks.import_time
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

STATEMENTS = {
    "python alone": "pass",
    "import autopar": "import autopar",
    "import jax": "import jax",
    "import autopar, first use": "import autopar; autopar.parallelize",
    "autopar --help": "import autopar.cli.arguments as a; a.make_parser().format_help()",
}


def seconds(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=120)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for number in range(rounds + 1):  # the first round writes the bytecode caches
        for name, statement in STATEMENTS.items():
            taken = seconds(statement)
            if number:
                times[name].append(taken)
    jax = statistics.median(times["import jax"])
    for name, samples in times.items():
        median = statistics.median(samples)
        print(f"{name:28} {median * 1e3:7.0f} ms   {median / jax:5.2f} of import jax")


if __name__ == "__main__":
    main()
