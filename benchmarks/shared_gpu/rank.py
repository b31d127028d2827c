"""One of the ranks that measure: from files of plans to a file of samples per model.

All ranks run the same list of programs in the same order. For each model they

    compile   a program each, write it to a file, and load those of the others
    check     that all programs have the same first losses
    time      rounds in which every program runs some steps, in an order that all ranks share

A program that cannot be compiled is left out by all ranks. Whatever fails in one rank alone ends
it, by its watchdog at the latest; the driver starts the ranks again without that program.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import jax

from autopar.ir.files import write_whole
from benchmarks.interleaved import Runner, sample_in_turns
from examples.models import Example

from .cases import CASES
from .group import FINISHED, Group, Watchdog
from .programs import (
    ModelState,
    Program,
    compile_expert,
    compile_plan,
    load_compiled,
    save_compiled,
)

COMPILE_LIMIT_S = 240.0
STEP_LIMIT_S = 60.0
MAX_STEPS = 20  # of a sample


class Rank:
    """`options`: of the command line. `work` holds compiled programs, progress and results."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.plans, self.work = Path(options.out), Path(options.work)
        self.index = jax.process_index()
        self.group = Group(self.index, jax.process_count())
        self.dog = Watchdog(self.work, self.index)
        self.devices = sorted(jax.devices(), key=lambda device: device.process_index)

    def run(self) -> None:
        for name in self.options.model:
            try:
                self._run_case(name)
            except BaseException as error:
                self.dog.failed(error)
                raise
        self.dog.watch(STEP_LIMIT_S, case="", program="", phase="end")
        self.group.gather(0)

    def _run_case(self, name: str) -> None:
        seconds = {"start": time.monotonic()}
        self._watch(name, "", "model", COMPILE_LIMIT_S)
        document = json.loads((self.plans / f"{name}.plans.json").read_text())
        failed = self._failed(name)
        tasks = [one for one in tasks_of(document) if one["name"] not in failed]
        example = CASES[name].example(tiny=document["tiny"])
        compiled, errors = self._compile(name, example, tasks)
        seconds["compile"] = time.monotonic()
        model = ModelState(example)
        programs = [Program(one["name"], compiled[one["name"]], model) for one in tasks
                    if one["name"] in compiled]  # fmt: skip
        facts = {program.name: self._check(name, program) for program in programs}
        seconds["check"] = time.monotonic()
        runners = self._time(name, programs)
        seconds["time"] = time.monotonic()
        for key, runner in runners.items():
            facts[key] |= {
                "samples": runner.samples,
                "num_steps": runner.num_steps,
                "compile_s": compiled_seconds(self._file(name, key)),
            }
        marks = list(seconds)
        phases = {b: seconds[b] - seconds[a] for a, b in itertools.pairwise(marks)}
        result = {"programs": facts, "errors": errors, "phases_s": phases}
        write_whole(result_file(self.work, name, self.index), json.dumps(result))
        self.group.gather(0)  # all results are written
        if self.index == 0:
            print(f"{FINISHED}{name}", flush=True)

    # -- compiling

    def _compile(
        self, name: str, example: Example, tasks: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Compiled programs by name, and why others could not be compiled."""
        own_errors = {}
        for number, task in enumerate(tasks):
            if number % self.group.size == self.index:
                self._watch(name, task["name"], "compile", COMPILE_LIMIT_S)
                if error := self._compile_own(name, example, task):
                    own_errors[task["name"]] = error
        self._watch(name, "", "others compile", COMPILE_LIMIT_S)
        errors = {key: text for one in self.group.gather(own_errors) for key, text in one.items()}
        leaves = len(jax.tree.leaves((example.abstract_state(), example.abstract_batch())))
        results = len(jax.tree.leaves(example.abstract_state())) + 1
        found = {}
        for task in tasks:
            if task["name"] not in errors:
                self._watch(name, task["name"], "load", STEP_LIMIT_S)
                path = self._file(name, task["name"])
                found[task["name"]] = load_compiled(path, leaves, results, task["results"])
        return found, errors

    def _compile_own(self, name: str, example: Example, task: dict[str, Any]) -> str:
        """Write the program's file, unless an earlier run did; returns why it cannot."""
        path = self._file(name, task["name"])
        if path.exists():
            return ""
        started = time.monotonic()
        try:
            if "plan" in task:
                text = json.dumps(task["plan"])
                compiled = compile_plan(example, text, self.devices, self.options.device)
            else:
                compiled = compile_expert(example, task["name"], self.devices)
        except Exception as error:  # of XLA, of binding: a result
            return f"{type(error).__name__}: {error}"[:2000]
        save_compiled(path, compiled)
        write_whole(path.with_suffix(".seconds"), str(time.monotonic() - started))
        return ""

    # -- running

    def _check(self, name: str, program: Program) -> dict[str, Any]:
        """Its first losses and its memory."""
        self._watch(name, program.name, "check", STEP_LIMIT_S)
        losses = program.first_losses()
        seen = program.seen_bytes()
        program.end()
        return {"losses": losses, "xla_bytes": program.xla_bytes, "seen_bytes": seen}

    def _time(self, name: str, programs: list[Program]) -> dict[str, Runner]:
        started = time.monotonic()
        runners: dict[str, Runner] = {}
        for program in programs:
            self._watch(name, program.name, "first", STEP_LIMIT_S)
            runners[program.name] = self._runner(name, program)
            program.end()
        order = random.Random(0)
        for index in range(self.options.rounds):
            enough = time.monotonic() - started > self.options.case_limit_s and index >= 2
            if self.group.from_first(enough):
                break
            sample_in_turns(list(runners.values()), order)
        for program in programs:
            program.end()
        return runners

    def _runner(self, name: str, program: Program) -> Runner:
        def begin() -> None:
            self._watch(name, program.name, "time", STEP_LIMIT_S)
            for other in self._holding:
                other.end()
            self._holding[:] = [program]
            program.begin()

        return Runner(
            program.advance,
            begin=begin,
            least_sample_s=self.options.sample_s,
            slowest=self.group.slowest,
            max_steps=MAX_STEPS,
        )

    _holding: list[Program] = []  # noqa: RUF012  # the program that has a state

    # -- files

    def _watch(self, case: str, program: str, phase: str, limit_s: float) -> None:
        self.dog.watch(limit_s, case=case, program=program, phase=phase)

    def _failed(self, name: str) -> dict[str, str]:
        path = self.work / "failed.json"
        return json.loads(path.read_text()).get(name, {}) if path.exists() else {}

    def _file(self, case: str, program: str) -> Path:
        slug = "".join(c if c.isascii() and c.isalnum() else "_" for c in program)
        return self.work / f"{case}.{slug}.compiled"


def tasks_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What to run: plans first. `results`: the type that the compiled step returns."""
    plans = [{**row, "results": list} for row in document["plans"]]
    return plans + [{**row, "results": tuple} for row in document["experts"]]


def compiled_seconds(path: Path) -> float | None:
    seconds = path.with_suffix(".seconds")
    return float(seconds.read_text()) if seconds.exists() else None


def result_file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.rank{rank}.json"


def main(options: Any) -> None:
    jax.config.update("jax_default_prng_impl", "rbg")  # compiles fast
    jax.distributed.initialize()
    Rank(options).run()
