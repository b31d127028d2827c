"""One of the ranks that measure: from files of plans to a file of samples per model.

All ranks run the same list of programs in the same order. For each model they

    compile   a program each, write it to a file, and load those of the others
    check     that all programs have the same first losses
    time      rounds in which every program runs some steps, in an order that all ranks share

A program that cannot be compiled is left out by all ranks. Whatever fails in one rank alone ends
it, by its watchdog at the latest; the driver starts the ranks again without that program.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import jax

import autopar
from autopar.ir.devices import preset_or_share
from autopar.ir.files import write_whole
from autopar.measure.judge import judge
from benchmarks.interleaved import Runner, sample_in_turns
from benchmarks.step_profile import profile_of
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

COMPILE_LIMIT_S = 120.0
MAX_STEPS = 20  # of a sample


class Rank:
    """`options`: of the command line. `work` holds compiled programs, progress and results."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.plans, self.work = Path(options.out), Path(options.work)
        self.index = jax.process_index()
        self.group = Group(self.index, jax.process_count())
        self.dog = Watchdog(self.work, self.index)
        self._holding: list[Program] = []  # the program that has a state
        self.devices = sorted(jax.devices(), key=lambda device: device.process_index)

    def run(self) -> None:
        for name in self.options.model:
            try:
                self._run_case(name)
            except BaseException as error:
                self.dog.failed(error)
                raise
        self.dog.watch(self.options.hang_limit_s, case="", program="", phase="end")
        self.group.gather(0)

    def _run_case(self, name: str) -> None:
        gc.collect()  # arrays of the case before
        seconds = {"start": time.monotonic()}
        self._watch(name, "", "model", COMPILE_LIMIT_S)
        document = json.loads((self.plans / f"{name}.plans.json").read_text())
        failed = self._failed(name)
        tasks = [one for one in tasks_of(document) if one["name"] not in failed]
        example = CASES[name].example(tiny=document["tiny"])
        files = {one["name"]: compiled_file(self.work, name, one) for one in tasks}
        compiled, errors = self._compile(name, example, tasks)
        seconds["compile"] = time.monotonic()
        self._watch(name, "", "create", COMPILE_LIMIT_S)
        model = ModelState(example)
        programs, facts = [], {}
        loaded = [Program(key, one, model) for key, one in compiled.items()]
        # The largest first: after others, the memory would be there, but in pieces.
        for program in sorted(loaded, key=lambda one: -one.xla_bytes):
            found, error = self._check(name, program)
            if error:
                errors[program.name] = error
            else:
                programs.append(program)
                facts[program.name] = found
        seconds["check"] = time.monotonic()
        runners = self._time(name, programs)
        seconds["time"] = time.monotonic()
        if self.options.kernels:
            self._profile(name, programs, files)
            seconds["profile"] = time.monotonic()
        for key, runner in runners.items():
            facts[key] |= {
                "samples": runner.samples,
                "num_steps": runner.num_steps,
                **of_compiled(files[key]),
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
                self._watch(name, task["name"], "load", self.options.hang_limit_s)
                path = compiled_file(self.work, name, task)
                found[task["name"]] = load_compiled(path, leaves, results, task["results"])
        return found, errors

    def _compile_own(self, name: str, example: Example, task: dict[str, Any]) -> str:
        """Write the program's file, unless an earlier run did; returns why it cannot."""
        path = compiled_file(self.work, name, task)
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
        if self.options.kernels:
            text = gzip.compress(compiled.as_text().encode())
            path.with_suffix(".hlo.gz").write_bytes(text)
        facts = {"compile_s": time.monotonic() - started, "judged": self._judged(compiled)}
        write_whole(path.with_suffix(".json"), json.dumps(facts))
        return ""

    def _judged(self, compiled: Any) -> dict[str, float] | None:
        """What the judge reads from the scheduled program; XLA for CPUs schedules none."""
        if self.options.platform == "cpu":
            return None
        device = preset_or_share(self.options.device, self.options.ranks_per_gpu)
        cluster = autopar.ClusterSpec(1, self.group.size, device=device)
        found = judge(compiled.as_text(), cluster)
        return {"step_s": found.step_s, "compute_s": found.compute_s, "exposed_s": found.exposed_s}

    # -- running

    def _check(self, name: str, program: Program) -> tuple[dict[str, Any], str]:
        """Its first losses and its memory; or why a rank cannot run it. A peak never falls, so it
        is seen only if it is the highest so far."""
        self._watch(name, program.name, "check", self.options.hang_limit_s)
        found: dict[str, Any] = {"xla_bytes": program.xla_bytes}
        error = ""
        try:
            before = program.peak_bytes()
            found["losses"] = program.first_losses()
            peak = program.peak_bytes()
            found["seen_bytes"] = None if peak == before else peak
        except jax.errors.JaxRuntimeError as failure:  # such as too little memory
            error = f"{type(failure).__name__}: {failure}"[:2000]
        program.end()
        return found, next(filter(None, self.group.gather(error)), "")

    def _time(self, name: str, programs: list[Program]) -> dict[str, Runner]:
        started = time.monotonic()
        runners: dict[str, Runner] = {}
        for program in programs:
            self._watch(name, program.name, "first", self.options.hang_limit_s)
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
        self._holding.clear()
        return runners

    def _runner(self, name: str, program: Program) -> Runner:
        def begin() -> None:
            self._watch(name, program.name, "time", self.options.hang_limit_s)
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

    def _profile(self, name: str, programs: list[Program], files: dict[str, Path]) -> None:
        """A step of each program under the first rank's profiler, beside the compiled program."""
        for program in programs:
            self._watch(name, program.name, "profile", self.options.hang_limit_s)
            program.begin()
            if self.index == 0:
                found = gzip.compress(profile_of(program.advance))
                files[program.name].with_suffix(".xplane.gz").write_bytes(found)
            else:
                jax.block_until_ready(program.advance())
            program.end()

    # -- files

    def _watch(self, case: str, program: str, phase: str, limit_s: float) -> None:
        self.dog.watch(limit_s, case=case, program=program, phase=phase)

    def _failed(self, name: str) -> dict[str, str]:
        path = self.work / "failed.json"
        return json.loads(path.read_text()).get(name, {}) if path.exists() else {}


def compiled_file(folder: Path, case: str, task: dict[str, Any]) -> Path:
    """Another file for another plan or release of JAX."""
    text = json.dumps([task["name"], task.get("plan"), jax.__version__])
    slug = "".join(c if c.isascii() and c.isalnum() else "_" for c in task["name"])
    return folder / f"{case}.{slug}.{hashlib.sha256(text.encode()).hexdigest()[:12]}.compiled"


def tasks_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What to run: plans first. `results`: the type that the compiled step returns."""
    plans = [{**row, "results": list} for row in document["plans"]]
    return plans + [{**row, "results": tuple} for row in document["experts"]]


def of_compiled(path: Path) -> dict[str, Any]:
    """What was found when the program was compiled."""
    facts = path.with_suffix(".json")
    nothing = {"compile_s": None, "judged": None}
    return json.loads(facts.read_text()) if facts.exists() else nothing


def result_file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.rank{rank}.json"


def main(options: Any) -> None:
    jax.config.update("jax_default_prng_impl", "rbg")  # compiles fast
    jax.distributed.initialize()
    Rank(options).run()
