"""The command line: `autopar demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autopar.errors import AutoparError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="autopar", description="Run a single-device JAX train step on many devices."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small GPT, sharded and on one device")
    demo.add_argument("--steps", type=_positive, default=30, help="training steps (default 30)")
    demo.add_argument("--batch-size", type=_positive, default=16, help="sequences per step")
    demo.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: the GPUs found, else 8 virtual CPU devices",
    )
    demo.add_argument(
        "--cluster",
        choices=("local", "ray"),
        default="local",
        help="ray: as a pipeline on a Ray cluster, started here if there is none",
    )
    arguments = parser.parse_args(argv)
    try:
        from autopar.demo import run_demo

        agrees = run_demo(
            arguments.steps, arguments.batch_size, arguments.platform, arguments.cluster
        )
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    return 0 if agrees else 1


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number ≥ 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
