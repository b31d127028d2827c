"""`autopar launch`: runs a command as several ranks on this host.

Every line of a rank is printed with its number before it. The exit code is that of the first rank
that failed; 124 at the time limit, as `timeout` has it.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from autopar.errors import ArgumentError
from autopar.runtime.ranks.launch import RankResult, run_ranks
from autopar.runtime.ranks.shared_gpu import CpuRanks, Ranks, count_gpus, gpu_ranks

TIMED_OUT = 124
_SIGNAL = 128


def run_launch(arguments: Namespace) -> int:
    """The exit code of the ranks."""
    with ranks_for(arguments) as ranks:
        print(f"autopar: {ranks.describe()}", file=sys.stderr, flush=True)
        results = run_ranks(
            arguments.rank_command, ranks, limit_s=arguments.time_limit, show=_print_line
        )
    failed = [result for result in results if result.failed]
    for result in failed:
        print(f"autopar: rank {result.rank} {_what_happened(result)}", file=sys.stderr)
    return _exit_code(failed)


def ranks_for(arguments: Namespace) -> Ranks:
    """The ranks that the options --ranks, --platform, --devices-per-rank, --nccl and --no-mps
    describe."""
    platform = arguments.platform or ("gpu" if count_gpus() else "cpu")
    if platform == "cpu":
        return CpuRanks(arguments.ranks, arguments.devices_per_rank)
    if arguments.devices_per_rank != 1:
        raise ArgumentError(
            f"--devices-per-rank {arguments.devices_per_rank}: a rank has one GPU. Use more ranks, "
            "or --platform cpu."
        )
    return gpu_ranks(arguments.ranks, nccl=arguments.nccl, mps=arguments.mps)


def _print_line(rank: int, line: str) -> None:
    sys.stdout.write(f"[{rank}] {line}\n")
    sys.stdout.flush()


def _what_happened(result: RankResult) -> str:
    if result.timed_out:
        return "was ended at the time limit"
    if result.returncode < 0:
        return f"was ended by signal {-result.returncode}"
    return f"failed with exit code {result.returncode}"


def _exit_code(failed: list[RankResult]) -> int:
    if any(result.timed_out for result in failed):
        return TIMED_OUT
    by_itself = [r.returncode for r in failed if r.returncode > 0]
    by_signal = [_SIGNAL - r.returncode for r in failed]
    return next(iter([*by_itself, *by_signal]), 0)
