"""autopar against experts, measured: steps on virtual CPU devices, all plans interleaved.

    Example, devices → a row: the median step of each plan, autopar over the best expert
    python -m benchmarks.experts.measured_cpu [--model NAME …] [--rounds N] [--json FILE]

A round runs every plan once, in random order, for at least `LEAST_SAMPLE_S`. After the first rounds
only autopar's plan and those near the fastest, by the clock or by processor time, continue. A ratio
is the median of the per-round ratios, so temporary load disturbs both sides. Processor time is that
of all threads of the process; other load changes it less than wall time. The best expert by one
need not be the best by the other.

On these devices memory is not tight and layers are few: of every layout, the expert is the one
without recomputation, with layers written out and stacked. Hand-written pipelines are left out,
since virtual devices are one host.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":  # before JAX is imported
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from autopar.runtime.timing import spread_of
from benchmarks.interleaved import Runner, sample_in_turns
from benchmarks.provenance import provenance
from benchmarks.script import script_parser, write_json
from examples.models import Example, build

from .expert import Expert
from .grid import DATA, FSDP, families_in_turns, plain_experts

NUM_DEVICES = 8
LEAST_SAMPLE_S = 0.2
FIRST_ROUNDS = 3
NEAR = 1.15  # times the fastest expert: who continues after the first rounds

# Wide for their batches, so that communication matters next to compute; steps of 0.1 to 0.3 s on
# two cores.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt": (
        "gpt-tiny", 16,
        {"hidden_size": 256, "num_layers": 2, "seq_len": 64, "vocab_size": 2048},
    ),
    "llama": (
        "llama-tiny", 16,
        {"hidden_size": 256, "num_layers": 2, "seq_len": 64, "ffn_size": 704, "vocab_size": 2048},
    ),
    "moe": (
        "moe-tiny", 16,
        {"hidden_size": 128, "num_layers": 2, "seq_len": 64, "group_size": 128, "vocab_size": 1024},
    ),
    "bert": (
        "bert-tiny", 16,
        {"hidden_size": 256, "num_layers": 2, "seq_len": 64, "vocab_size": 2048},
    ),
    "wresnet": ("wresnet-tiny", 16, {"base_channels": 32, "image_size": 32}),
}  # fmt: skip


def example_of(name: str) -> Example:
    model, batch_size, overrides = MODELS[name]
    return build(model, batch_size, **overrides)


class StepRunner(Runner):
    """A step with its state."""

    def __init__(self, plan: str, family: str, step: Callable[..., Any], state: Any, batch: Any):
        self.plan, self.family = plan, family
        self.facts: dict[str, Any] = {}
        kept = [state]

        def advance() -> Any:
            kept[0], loss = step(kept[0], batch)
            return kept[0], loss

        super().__init__(advance, least_sample_s=LEAST_SAMPLE_S, waits_each_step=True)


def autopar_runner(example: Example, devices: Sequence[Any], method: Any = None) -> StepRunner:
    """autopar's plan with the default method."""
    autopar.init(devices=list(devices))
    step = autopar.parallelize(example.train_step, method=method or autopar.AutoParallel())
    state, batch = example.create_state(), example.make_batch()
    started = time.perf_counter()
    plan = step.plan(state, batch)
    planned_s = time.perf_counter() - started
    runner = StepRunner("autopar", "autopar", step, state, batch)
    meshes = [stage.mesh_shape for stage in plan.stages] if plan.is_pipeline else [plan.mesh_shape]
    runner.facts = {
        "planned_s": planned_s,
        "mesh": ", ".join("×".join(map(str, shape)) for shape in meshes),
        "num_micro_batches": plan.num_micro_batches,
        "remat_layers": len(plan.remat),
        "predicted_ms": 1e3 * plan.estimated_step_s,
    }
    return runner


def expert_runner(expert: Expert, example: Example, devices: Sequence[Any]) -> StepRunner:
    assert expert.layout is not None
    runner = StepRunner(expert.name, expert.family, *expert.made(example, devices))
    runner.facts = {"mesh": "×".join(map(str, expert.layout.mesh_shape))}
    return runner


def candidates(example: Example, num_devices: int) -> list[Expert]:
    """Every layout, and data parallelism and FSDP also with stacked layers."""
    found: list[Expert] = []
    for scanned in (False, True)[: 1 + hasattr(example.config, "scan_layers")]:
        for expert in plain_experts(example, num_devices, scan_layers=scanned):
            if not scanned or expert.family in (DATA, FSDP):
                found.append(expert)
    return families_in_turns(found)


def measure(
    example: Example,
    devices: Sequence[Any],
    *,
    rounds: int = 9,
    limit_s: float = 600.0,
    method: Any = None,
    families: Sequence[str] = (),
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The row of one model. After half of `limit_s` no more candidates are compiled; at its end no
    more rounds run (the first ones always do). `families`: of the experts to run; all, if empty."""
    load = os.getloadavg()[0]
    started = time.perf_counter()
    runners = [autopar_runner(example, devices, method)]
    experts = candidates(example, len(devices))
    if families:
        experts = [expert for expert in experts if expert.family in families]
    for expert in experts:
        if len(runners) > 1 and time.perf_counter() - started > limit_s / 2:
            tell(f"  {len(experts) + 1 - len(runners)} of {len(experts)} experts: no time left")
            break
        runners.append(expert_runner(expert, example, devices))
        tell(f"  {time.perf_counter() - started:4.0f} s: compiled {expert.name}")
    order = random.Random(0)
    running = runners
    for index in range(rounds):
        if index >= FIRST_ROUNDS and time.perf_counter() - started > limit_s:
            break
        sample_in_turns(running, order)
        if index + 1 == min(FIRST_ROUNDS, rounds):
            running = [runners[0], *near_the_fastest(runners[1:])]
    row = compared(runners[0], running[1:])
    made = {"made": provenance()}
    row["results"] = [result_of(runner) | made for runner in runners]
    row |= {"batch": example.batch_size, "load": load, "rounds": len(runners[0].samples)}
    row["num_experts"], row["num_experts_run"] = len(experts), len(runners) - 1
    for result in sorted(row["results"], key=lambda one: one["step_ms"]):
        tell(
            f"  {result['step_ms']:8.1f} ms ± {result['spread']:4.0%},"
            f" processor {result['processor_ms']:8.1f} ms  {result['plan']}"
        )
    return row


def near_the_fastest(experts: Sequence[StepRunner]) -> list[StepRunner]:
    """By the clock or by processor time."""
    clock_s, processor_s = (min(map(time_of, experts)) for time_of in (_clock_s, _processor_s))
    return [
        one
        for one in experts
        if _clock_s(one) <= NEAR * clock_s or _processor_s(one) <= NEAR * processor_s
    ]


def _clock_s(runner: StepRunner) -> float:
    return runner.step_s


def _processor_s(runner: StepRunner) -> float:
    return statistics.median(runner.processor_samples)


def compared(ours: StepRunner, experts: Sequence[StepRunner]) -> dict[str, Any]:
    """autopar over the best expert by the clock, and over the best by processor time, among those
    that ran in all rounds."""
    best, thrifty = (min(experts, key=time_of) for time_of in (_clock_s, _processor_s))
    ratios = [a / b for a, b in zip(ours.samples, best.samples, strict=True)]
    processor = [
        a / b for a, b in zip(ours.processor_samples, thrifty.processor_samples, strict=True)
    ]
    middle = statistics.median(ratios)
    return {
        "best": best.plan,
        "ratio": middle,
        "ratio_spread": spread_of(ratios) * middle,
        "processor_best": thrifty.plan,
        "processor_ratio": statistics.median(processor),
        "processor_spread": spread_of(processor) * statistics.median(processor),
    }


def result_of(runner: StepRunner) -> dict[str, Any]:
    return {
        "plan": runner.plan,
        "family": runner.family,
        "fits": True,
        "step_ms": 1e3 * runner.step_s,
        "spread": runner.spread,
        "processor_ms": 1e3 * _processor_s(runner),
        "samples": len(runner.samples),
        **runner.facts,
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit-s", type=float, default=600.0, help="per model")
    parser.add_argument("--family", nargs="+", default=[], help="of experts; all by default")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    rows = []
    for name in options.model:
        print(f"{name}:", flush=True)
        measured = measure(
            example_of(name),
            jax.devices(),
            rounds=options.rounds,
            limit_s=options.limit_s,
            families=options.family,
            tell=lambda line: print(line, flush=True),
        )
        row = {"model": name, **measured}
        print(
            f"{name}: autopar / {row['best']} = {row['ratio']:.3f} ± {row['ratio_spread']:.3f};"
            f" by processor time, / {row['processor_best']} = {row['processor_ratio']:.3f}"
            f" ± {row['processor_spread']:.3f}",
            flush=True,
        )
        rows.append(row)
        about = {"jax": jax.__version__, "cores": os.cpu_count()}
        write_json(options.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
