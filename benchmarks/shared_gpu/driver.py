"""The run phase: from files of plans to a results file, by ranks that restart if one fails.

A case is done when all ranks have written its samples; its row then goes to the results file, and a
later run leaves it out. If the ranks fail, the program that they were at is noted as failed, and
they start again without it. Compiled programs stay in the work folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.ir.files import write_whole
from autopar.runtime.ranks.launch import RankResult, run_ranks
from autopar.runtime.ranks.shared_gpu import CpuRanks, Ranks, gpu_ranks

from .cases import CASES
from .group import FINISHED, HANG_CODE, progress_file
from .plans import plan_file
from .rank import result_file
from .tables import case_row, line_of

MOST_FAILURES = 3  # of a case; then it is given up
# One rank compiles a program for all; by default each would wait for the others' share of tuning.
# Nothing is tuned unless it must be (`Case.autotune_level`): eight ranks that time kernels at once
# disturb each other, and it takes minutes. Products are cuBLAS's, by its own choice.
_XLA_FLAGS = "--xla_gpu_shard_autotuning=false --xla_gpu_enable_triton_gemm=false"
_ENDED_BY_LAUNCHER = (0, -15, -9)


class Driver:
    """`about`: what the results file says of the machine."""

    def __init__(self, options: Any, about: dict[str, Any]) -> None:
        self.options = options
        self.plans, self.work = Path(options.out), Path(options.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.document = read_document(options.json) or {**about, "cases": {}}
        self.ends_s = time.monotonic() + options.limit_s

    def run(self) -> dict[str, Any]:
        with ranks_of(self.options) as ranks:
            self.document["ranks"] = ranks.describe()
            while (names := self._wanted()) and time.monotonic() < self.ends_s:
                results = self._run_ranks(ranks, names)
                for name in names:
                    self._collect(name)
                if any(one.failed for one in results):
                    self._note_failure(results, names)
                elif names == self._wanted():
                    break  # no row came of it
        return self.document

    def _wanted(self) -> list[str]:
        """The cases of the next launch: those that are left and tuned as the first of them."""
        given_up = [case for case, failed in self._failed().items() if len(failed) >= MOST_FAILURES]
        left = [
            name
            for name in self.options.model
            if name not in self.document["cases"]
            and name not in given_up
            and plan_file(self.plans, name).exists()
        ]
        return [
            name for name in left if CASES[name].autotune_level == CASES[left[0]].autotune_level
        ]

    def _run_ranks(self, ranks: Ranks, names: Sequence[str]) -> list[RankResult]:
        options = self.options
        command = [sys.executable, "-m", "benchmarks.shared_gpu", "rank", "--model", *names]
        for option in (
            "out",
            "work",
            "rounds",
            "sample_s",
            "case_limit_s",
            "hang_limit_s",
            "device",
            "platform",
            "ranks_per_gpu",
        ):
            command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
        command += ["--kernels"] if options.kernels else []
        env = {}
        if ranks.platform == "gpu":
            env["JAX_PLATFORMS"] = "cuda"  # in this process it is "cpu"
            level = f"--xla_gpu_autotune_level={CASES[names[0]].autotune_level}"
            given = os.environ.get("XLA_FLAGS", "")
            env["XLA_FLAGS"] = f"{given} {_XLA_FLAGS} {level}".strip()
        for rank in range(ranks.num_ranks):
            progress_file(self.work, rank).unlink(missing_ok=True)

        def show(rank: int, line: str) -> None:
            if rank == 0 and line.startswith(FINISHED):
                self._collect(line.removeprefix(FINISHED))
            elif options.verbose:
                print(f"[{rank}] {line}", flush=True)

        limit_s = max(1.0, self.ends_s - time.monotonic())
        return run_ranks(command, ranks, limit_s=limit_s, env=env, show=show)

    def _collect(self, name: str) -> None:
        """The row of a case, once all ranks have written their files."""
        paths = [result_file(self.work, name, rank) for rank in range(self.options.ranks)]
        if name in self.document["cases"] or not all(path.exists() for path in paths):
            return
        planned = json.loads(plan_file(self.plans, name).read_text())
        measured = [json.loads(path.read_text()) for path in paths]
        case = CASES[name]
        label = case.tiny if planned["tiny"] else case.label
        row = case_row(label, planned, measured, self._failed().get(name, {}))
        self.document["cases"][name] = row
        print(line_of(name, row), flush=True)
        if self.options.json:
            write_whole(self.options.json, json.dumps(self.document, indent=1) + "\n")

    # -- failures

    def _failed(self) -> dict[str, dict[str, str]]:
        path = self.work / "failed.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _note_failure(self, results: Sequence[RankResult], names: Sequence[str]) -> None:
        case, program, text = failure_of(self.work, results)
        failed = self._failed()
        noted = failed.setdefault(case or names[0], {})
        noted[program or f"(start {len(noted)})"] = text
        write_whole(self.work / "failed.json", json.dumps(failed))
        print(f"{case or names[0]}: {program or 'ranks'} failed: {text[:300]}", flush=True)
        if not program:
            worst = next((one for one in results if one.returncode > 0), results[0])
            print(worst.output[-3000:], flush=True)


def failure_of(folder: Path, results: Sequence[RankResult]) -> tuple[str, str, str]:
    """(case, program, why) of the first failure: the earliest error that a rank noted, or else
    what a rank was at that hung or crashed."""
    noted = {}
    for one in results:
        with contextlib.suppress(OSError, ValueError):
            path = progress_file(folder, one.rank)
            noted[one.rank] = (path.stat().st_mtime, json.loads(path.read_text()))
    errors = sorted((when, rank) for rank, (when, what) in noted.items() if "error" in what)
    if errors:
        what = noted[errors[0][1]][1]
        return what.get("case", ""), what.get("program", ""), what["error"]
    own_end = [one for one in results if one.returncode not in _ENDED_BY_LAUNCHER]
    worst = (own_end or [one for one in results if one.failed])[0]
    _, what = noted.get(worst.rank, (0.0, {}))
    hung = worst.timed_out or worst.returncode == HANG_CODE
    why = f"hung in phase {what.get('phase')!r}" if hung else f"exit code {worst.returncode}"
    return what.get("case", ""), what.get("program", ""), why


def ranks_of(options: Any) -> Ranks:
    if options.platform == "cpu":
        return CpuRanks(options.ranks)
    return gpu_ranks(options.ranks, nccl=options.nccl)


def read_document(path: str | None) -> dict[str, Any] | None:
    if path and Path(path).exists():
        return json.loads(Path(path).read_text())
    return None
