"""The cost of a warm call against hand-written `jax.jit` with the same shardings.

    python -m benchmarks.overhead [--json FILE]

8 virtual CPU devices. Both programs take the same state and batch in the same layout and run
interleaved; the ratio is that of the median step times. The tiny step measures the call itself, in
µs: what our wrapper adds to JAX's dispatch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from benchmarks.script import script_parser, write_json
from examples.models import build


def by_hand(train_step: Any, plan: autopar.ParallelPlan, mesh: Mesh) -> Any:
    """`jax.jit` with the shardings of a plan, as a user would write it."""
    place = lambda tree: jax.tree.map(  # noqa: E731
        lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda s: isinstance(s, P)
    )
    return jax.jit(
        train_step,
        in_shardings=place(plan.input_specs),
        out_shardings=place(plan.output_specs),
        donate_argnums=0,
    )


def in_turns(
    sides: dict[str, tuple[Callable[..., Any], Any]], batch: Any, rounds: int, steps: int
) -> dict[str, float]:
    """Median seconds per step of each side; the order alternates between rounds."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    states = {name: state for name, (_, state) in sides.items()}
    for index in range(rounds):
        names = list(sides) if index % 2 else list(reversed(sides))
        for name in names:
            step, state = sides[name][0], states[name]
            started = time.perf_counter()
            for _ in range(steps):
                state, loss = step(state, batch)
                # Virtual devices must not run ahead: their collectives share the host's threads.
                jax.block_until_ready(state)
            jax.block_until_ready(loss)
            samples[name].append((time.perf_counter() - started) / steps)
            states[name] = state
    return {name: statistics.median(values) for name, values in samples.items()}


def compare(
    train_step: Any, make_state: Any, batch: Any, method: Any, rounds: int, steps: int
) -> dict[str, Any]:
    ours = autopar.parallelize(train_step, method=method)
    state = make_state()
    mine, _ = ours(state, batch)
    executable = ours.last_executable
    assert executable is not None
    mesh = executable.mesh
    hand = by_hand(train_step, executable.plan, mesh)
    theirs, _ = hand(make_state(), batch)
    placed = jax.device_put(batch, NamedSharding(mesh, P(mesh.axis_names)))
    seconds = in_turns({"autopar": (ours, mine), "by hand": (hand, theirs)}, placed, rounds, steps)
    return {
        "autopar_us": 1e6 * seconds["autopar"],
        "by_hand_us": 1e6 * seconds["by hand"],
        "ratio": seconds["autopar"] / seconds["by hand"],
        "added_us": 1e6 * (seconds["autopar"] - seconds["by hand"]),
    }


def tiny_step(state: Any, batch: Any) -> Any:
    return {"w": state["w"] * 0.5}, batch + 1.0  # no collective: only the call costs


def main() -> None:
    parser = script_parser(__doc__)
    arguments = parser.parse_args()
    rows = {}
    example = build("gpt-tiny", batch_size=64, hidden_size=128, num_layers=4)
    rows["GPT 4 × 128, data parallel"] = compare(
        example.train_step,
        example.create_state,
        example.make_batch(),
        autopar.DataParallel(),
        rounds=15,
        steps=4,
    )
    rows["tiny step"] = compare(
        tiny_step,
        lambda: {"w": jnp.ones(8)},
        jnp.ones(64),
        autopar.DataParallel(),
        rounds=21,
        steps=300,
    )
    for name, row in rows.items():
        print(
            f"{name:28s} autopar {row['autopar_us']:9.1f} µs  by hand {row['by_hand_us']:9.1f} µs"
            f"  ratio {row['ratio']:.3f}  added {row['added_us']:.1f} µs"
        )
    write_json(arguments.json, {"jax": jax.__version__, "cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
