"""`autopar profile --ranks N`: starts N ranks on this host, which measure together.

Every rank runs `autopar profile` too, finds the others in its environment, and joins them. The same
happens in ranks of `autopar launch`, and in processes that a scheduler starts with
JAX_COORDINATOR_ADDRESS set.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.ranks.launch import RankResult, run_ranks
from autopar.runtime.ranks.shared_gpu import CpuRanks, Ranks, count_gpus, gpu_ranks

OK, INTERRUPTED = 0, 130
_COORDINATOR = "JAX_COORDINATOR_ADDRESS"
_START_S = 300.0  # beyond the time limit: for JAX to start, and for the last sample
_LIMITS_S = {True: 600.0, False: 4 * 3600.0}  # without a time limit; quick or not
_SHOWN_LINES = 15  # of a rank that failed


def is_rank() -> bool:
    """Whether this process was started as one of several."""
    return _COORDINATOR in os.environ


def run_on_ranks(arguments: Namespace) -> int:
    """Start the ranks, and show what rank 0 prints."""
    for option in ("address", "hosts", "devices"):
        if getattr(arguments, option) is not None:
            raise ArgumentError(f"autopar profile --ranks: takes no --{option}.")
    if arguments.cluster != "local":
        raise ArgumentError("autopar profile --ranks: is for this host; leave out --cluster ray.")
    limit_s = _LIMITS_S[arguments.quick]
    if arguments.time is not None:
        limit_s = 1.5 * arguments.time + _START_S
    try:
        with _ranks_for(arguments) as ranks:
            print(f"starting {ranks.describe()}", flush=True)
            results = run_ranks(rank_command(arguments), ranks, limit_s=limit_s, show=_show)
    except KeyboardInterrupt:
        print(
            "\ninterrupted: samples are kept. The same command continues; --restart discards them.",
            file=sys.stderr,
        )
        return INTERRUPTED
    failed = [result for result in results if result.failed]
    if failed:
        raise ClusterError(_failure_text(failed, limit_s))
    return OK


def _ranks_for(arguments: Namespace) -> Ranks:
    is_cpu = arguments.platform == "cpu" or (arguments.platform == "auto" and not count_gpus())
    if is_cpu:
        return CpuRanks(arguments.ranks)
    return gpu_ranks(arguments.ranks, nccl=arguments.nccl, mps=not arguments.no_mps)


def rank_command(arguments: Namespace) -> list[str]:
    """What each rank runs: the same measurement, without starting ranks."""
    command = [sys.executable, "-m", "autopar", "profile"]
    for name in ("output", "only", "time"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    return command + [f"--{name}" for name in ("quick", "restart") if getattr(arguments, name)]


def _show(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def _failure_text(failed: list[RankResult], limit_s: float) -> str:
    """The rank that failed by itself comes first, best one that died: the others often fail because
    of it."""
    first = min(failed, key=lambda result: (result.was_ended, result.returncode >= 0))
    if first.timed_out:
        what = f"did not end within {limit_s:.0f} s"
    elif first.returncode < 0:
        what = f"was ended by signal {-first.returncode}"
    else:
        what = f"failed with exit code {first.returncode}"
    lines = first.output.splitlines()[-_SHOWN_LINES:]
    said = "\n".join(f"    {line}" for line in lines)
    others = f" {len(failed)} of the ranks failed." if len(failed) > 1 else ""
    return (
        f"profile: rank {first.rank} {what}.{others} Samples so far are kept; the same command "
        f"continues. Its last lines:\n{said or '    (none)'}"
    )
