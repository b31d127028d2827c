"""A GPT whose optimizer state does not fit on one GPU: steps with Adam's moments in host memory.

    python -m benchmarks.host_memory --size 1.3b            # on an H200
    python -m benchmarks.host_memory --size 10b             # 80 GB of moments in host memory
    python -m benchmarks.host_memory --size tiny            # a dry run on a CPU, with a budget
    python -m benchmarks.host_memory --layers 8 --share 0.86 --compile      # without a GPU

Parameters, gradients and moments are float32, and products are bfloat16. 10 billion parameters take
40 GB, as do their gradients: both fit on an H200. The 80 GB of moments do not, and lie in pinned
memory of the host, of which JAX uses no more than `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`; this script
sets it. Smaller sizes get a budget that leaves no room for the moments (`--share` of what the step
takes on the device), so that they are in host memory too.

The update is that of the optimizer alone; a step is bound by the longer of its compute and its
transfers. Compute is the time of the program with forward and backward pass, by itself; transfers
are the time to fetch all moments while all are stored, by a program that does nothing else.
Losses are those of `jax.jit` where the step fits without host memory (`--check`), and in any case
must fall. Prints a line of JSON after each part, and writes it to `--out` if that is given.
`--compile` only compiles the step's programs for an H100 and counts their memory; this needs
`jax[cuda13]`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

OF_JAX = 0.96  # of the memory that JAX has on the device, the budget of a size that needs it all
LIMIT_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class Size(NamedTuple):
    """Of a GPT. `micro`: rows of a micro-batch."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    rows: int
    micro: int


SIZES = {
    "tiny": Size(6, 64, 4, 32, 256, 8, 4),
    "1.3b": Size(24, 2048, 16, 1024, 32000, 32, 8),
    "2.6b": Size(32, 2560, 20, 1024, 32000, 32, 8),
    "6.7b": Size(32, 4096, 32, 1024, 32000, 48, 8),
    "10b": Size(48, 4096, 32, 1024, 32000, 64, 8),
}


def make(size: Size) -> tuple[Any, Any, Any]:
    """(function that makes the state from a key, train step, batch)."""
    import jax
    import jax.numpy as jnp

    bf16, f32 = jnp.bfloat16, jnp.float32
    d = size.width

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 4 * size.layers + 2))

        def normal(*shape: int) -> Any:
            return 0.02 * jax.random.normal(next(keys), shape, f32)

        layers = [
            {
                "g1": jnp.ones(d),
                "g2": jnp.ones(d),
                "qkv": normal(d, 3 * d),
                "out": normal(d, d),
                "up": normal(d, 4 * d),
                "down": normal(4 * d, d),
            }
            for _ in range(size.layers)
        ]
        params = {
            "tokens": normal(size.vocabulary, d),
            "positions": normal(size.length, d),
            "layers": layers,
            "g": jnp.ones(d),
        }
        zeros = jax.tree.map(jnp.zeros_like, params)
        more = jax.tree.map(jnp.zeros_like, params)
        return {"params": params, "mu": zeros, "nu": more, "count": jnp.zeros((), jnp.int32)}

    def norm(x: Any, g: Any) -> Any:
        y = x.astype(f32)
        y = y - y.mean(-1, keepdims=True)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * g).astype(bf16)

    @jax.checkpoint
    def block(x: Any, w: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = jnp.split(norm(x, w["g1"]) @ w["qkv"].astype(bf16), 3, -1)
        q, k, v = (t.reshape(b, s, size.heads, d // size.heads) for t in (q, k, v))
        scores = jnp.einsum("bqhc,bkhc->bhqk", q, k).astype(f32) / (d // size.heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e30)
        mixed = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores).astype(bf16), v)
        x = x + mixed.reshape(b, s, d) @ w["out"].astype(bf16)
        return x + jax.nn.gelu(norm(x, w["g2"]) @ w["up"].astype(bf16)) @ w["down"].astype(bf16)

    def loss_of(params: Any, batch: Any) -> Any:
        x = (params["tokens"][batch["x"]] + params["positions"]).astype(bf16)
        for w in params["layers"]:
            x = block(x, w)
        logits = (norm(x, params["g"]) @ params["tokens"].T.astype(bf16)).astype(f32)
        picked = jnp.take_along_axis(logits, batch["y"][..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["nu"], grads)
        first, second = 1 - 0.9**count, 1 - 0.99**count
        params = jax.tree.map(
            lambda p, m, v: p - 1e-4 * (m / first) / (jnp.sqrt(v / second) + 1e-8),
            state["params"],
            mu,
            nu,
        )
        return {"params": params, "mu": mu, "nu": nu, "count": count}, loss

    key = jax.random.key(1)
    tokens = jax.random.randint(key, (size.rows, size.length + 1), 0, size.vocabulary)
    return init, train_step, {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def seconds(run: Any, times: int) -> float:
    """The shortest of some runs, after one that does not count."""
    run()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)


def transfer_seconds(executable: Any, state: Any) -> float:
    """To fetch all state in host memory while all of it is stored: one array at a time is in each
    direction, as in the step."""
    import jax

    from autopar.ir.host_programs import HOST_KIND

    held = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind == HOST_KIND]
    largest = max(held, key=lambda x: x.nbytes)
    there, here = largest.sharding, largest.sharding.with_memory_kind("device")
    on_device = jax.device_put(largest, here)

    def both() -> None:
        jax.block_until_ready(jax.device_put([largest, on_device], [here, there]))

    once = seconds(both, 3)
    return once * executable.host_bytes() / (largest.nbytes / len(largest.sharding.device_set))


def run(name: str, size: Size, share: float, steps: int, check: bool, out: Path | None) -> None:
    import jax
    import numpy as np

    import autopar

    autopar.init(devices=jax.devices()[:1])
    init, train_step, batch = make(size)
    device = jax.devices()[0]
    row: dict[str, Any] = {"size": name, "device": device.device_kind, "jax": jax.__version__}

    def told(**more: Any) -> None:
        row.update(more)
        print(json.dumps(more), flush=True)
        if out is not None:
            out.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")

    shapes = jax.eval_shape(init, jax.random.key(0))
    params = sum(x.size for x in jax.tree.leaves(shapes["params"]))
    num_micro_batches = size.rows // size.micro
    told(parameters=params, state_bytes=sum(x.size * 4 for x in jax.tree.leaves(shapes)))
    available = (device.memory_stats() or {}).get("bytes_limit")
    budget = None if available is None else OF_JAX * available
    options = autopar.ShardingOptions(memory_budget_bytes=budget)
    if share < 1:
        free = autopar.ShardingOptions(host_memory="never", memory_budget_bytes=1e15)
        method = autopar.ShardParallel(num_micro_batches=num_micro_batches, options=free)
        plain = autopar.parallelize(train_step, method=method).plan(shapes, batch)
        budget = share * plain.estimated_peak_bytes
        options = autopar.ShardingOptions(memory_budget_bytes=budget)
        told(device_only_bytes=plain.estimated_peak_bytes, budget_bytes=budget)
    began = time.perf_counter()
    method = autopar.ShardParallel(num_micro_batches=num_micro_batches, options=options)
    step = autopar.parallelize(train_step, method=method)
    create = autopar.parallelize(init, method=autopar.CreateStateParallel(step, batch))
    state = jax.block_until_ready(create(jax.random.key(0)))
    plan = step.last_planned.plan
    assert plan.host is not None, "the step fits without host memory: give a smaller --share"
    told(
        prepared_s=time.perf_counter() - began,
        host_bytes=plan.host.num_bytes,
        host_parameters=len(plan.host.parameters),
        groups=plan.host.num_groups,
        predicted_step_s=plan.estimated_step_s,
        predicted_transfer_s=plan.host.transfer_s,
        predicted_peak_bytes=plan.estimated_peak_bytes,
        recomputed=len(plan.remat),
    )
    losses, taken = [], []
    for _ in range(steps):
        began = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready(state)
        losses.append(float(loss))
        taken.append(time.perf_counter() - began)
    executable = step.last_executable
    stats = device.memory_stats() or {}
    told(
        step_s=min(taken[1:]),
        steps_s=taken,
        losses=losses,
        xla_peak_bytes=executable.memory_bytes(),
        device_peak_bytes=stats.get("peak_bytes_in_use"),
    )
    assert losses[-1] < losses[0], losses
    told(transfer_s=transfer_seconds(executable, state))
    told(compute_s=compute_seconds(executable, state, batch))
    bound = max(row["compute_s"], row["transfer_s"])
    told(bound_s=bound, speed_over_bound=bound / row["step_s"])
    if check:
        reference, expected = init(jax.random.key(0)), []
        for _ in range(steps):
            reference, loss = jax.jit(train_step, donate_argnums=0)(reference, batch)
            expected.append(float(loss))
        told(expected_losses=expected, same_losses=bool(np.allclose(losses, expected, rtol=2e-3)))


def compile_programs(size: Size, share: float) -> Iterator[dict[str, Any]]:
    """Predicted memory beside XLA's, of the fullest program with what it leaves on the device."""
    from benchmarks import gpu_hlo

    # isort: split
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import autopar
    from autopar.lower.host_programs import lower_with_host_memory

    autopar.init(devices=jax.devices()[:1])
    init, train_step, batch = make(size)
    shapes = jax.eval_shape(init, jax.random.key(0))

    def planned(options: Any) -> Any:
        method = autopar.ShardParallel(
            num_micro_batches=size.rows // size.micro, options=autopar.ShardingOptions(**options)
        )
        step = autopar.parallelize(train_step, method=method)
        step.plan(shapes, batch)
        return step.last_planned

    free = planned({"host_memory": "never", "memory_budget_bytes": 1e15}).plan
    budget = share * free.estimated_peak_bytes
    yield {"device_only_bytes": free.estimated_peak_bytes, "budget_bytes": budget}
    step = planned({"memory_budget_bytes": budget})
    plan = step.plan
    assert plan.host is not None, "the step fits without host memory: give a smaller --share"
    yield {
        "predicted_peak_bytes": plan.estimated_peak_bytes,
        "host_bytes": plan.host.num_bytes,
        "host_parameters": len(plan.host.parameters),
    }
    mesh = Mesh(np.array(gpu_hlo.h100_devices(1)).reshape(plan.mesh_shape), plan.axis_names)
    programs = lower_with_host_memory(step, mesh, "cuda")
    there = set(range(len(step.traced.program.inputs)))
    known: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for program in programs.programs:
        reads = [programs.slots[slot] for slot in program.reads]
        lowered = jax.jit(
            program.function,
            donate_argnums=tuple(n for n, s in enumerate(program.reads) if s in program.used_up),
            in_shardings=[slot.sharding for slot in reads],
            out_shardings=[programs.slots[slot].sharding for slot in program.writes],
        ).lower(*reads)
        text = lowered.as_text()
        if text not in known:
            known[text] = gpu_hlo.peak_bytes(lowered.compile())
        there = there.union(slot for _, slot in program.fetches)
        unread = [s for s in there.difference(program.reads) if s not in programs.on_host]
        held = sum(
            programs.slots[s].dtype.itemsize * int(np.prod(programs.slots[s].shape)) for s in unread
        )
        peaks[program.name] = known[text] + held
        there = there.union(program.writes).difference(program.used_up)
        if program.name == "step":
            yield {"step_xla_bytes": peaks["step"]}
    fullest = max(peaks, key=peaks.__getitem__)
    yield {"xla_peak_bytes": peaks[fullest], "fullest": fullest}


def compute_seconds(executable: Any, state: Any, batch: Any) -> float:
    """Of the main program: everything but casts of parameters and the update of state in host
    memory. It uses the state up; copies may not fit beside it."""
    import jax
    import jax.numpy as jnp

    programs = executable.programs
    program = programs.programs[programs.main]
    leaves = jax.tree.leaves((state, batch))
    casts = [s for s in program.reads if s >= len(leaves)]
    zeros = {s: jnp.zeros(programs.slots[s].shape, programs.slots[s].dtype) for s in casts}
    leaves = {**dict(enumerate(leaves)), **zeros}
    compiled = executable.compiled[program.name]
    began = time.perf_counter()
    jax.block_until_ready(compiled(*(leaves[s] for s in program.reads)))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--share", type=float, help="of what the step takes on the device")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="compare with jax.jit")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--limit-s", type=int, default=170, help="end after so many seconds")
    parser.add_argument("--layers", type=int, help="instead of the size's")
    parser.add_argument("--compile", action="store_true", help="for an H100, without a GPU")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    size = size._replace(layers=arguments.layers or size.layers)
    os.environ.setdefault(LIMIT_GB, "100")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    signal.alarm(arguments.limit_s)
    share = arguments.share
    if share is None:
        share = {"10b": 1.0, "tiny": 0.85}.get(arguments.size, 0.72)
    if arguments.compile:
        flags = os.environ.get("XLA_FLAGS", "")  # products by cuBLAS, as `autopar.verify` has them
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_triton_gemm=false".strip()
        for figures in compile_programs(size, share):
            print(json.dumps(figures), flush=True)
        return
    run(arguments.size, size, share, arguments.steps, arguments.check, arguments.out)


if __name__ == "__main__":
    main()
