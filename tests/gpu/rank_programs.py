"""What each rank of `test_ranks_gpu.py` runs: check after check, whose outcomes it writes as JSON.

    python rank_programs.py FOLDER CHECK …

Every rank runs all checks in the same order. An outcome is a line {"check": …, …} of
FOLDER/rank_N.jsonl. The oracle is `jax.jit` on the rank's own device. On a CPU everything is
smaller, and attention is XLA's instead of cuDNN's.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import autopar
from autopar import DataParallel, ShardingOptions, ShardParallel, Zero3Parallel
from examples.models import Example, gpt

NUM_STEPS = 200
MEMORY_METHODS = ("data", "zero3", "2x4")
ATTENTION_STEPS = 4
FAILING_RANK = 5
# A tiny eps would make full steps of gradients that are zero but for rounding.
TX = optax.adam(1e-3, eps=1e-3)
# As Megatron-LM splits a layer over y: the first product of a pair by columns, the second by rows.
MEGATRON = {
    "state.params*['qkv']['kernel']": P(None, "y"),
    "state.params*['out']['kernel']": P("y", None),
    "state.params*['up']['kernel']": P(None, "y"),
    "state.params*['down']['kernel']": P("y", None),
}
METHODS = {
    "data": DataParallel(),
    "zero3": Zero3Parallel(),
    "2x4": ShardParallel((2, 4), options=ShardingOptions(pins=MEGATRON, batch_axis="x")),
}

Outcome = dict[str, Any]
_arguments = {"folder": Path()}


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def note(outcome: Outcome) -> None:
    path = _arguments["folder"] / f"rank_{jax.process_index()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(outcome) + "\n")


def create_state(example: Example, key: jax.Array) -> Any:
    state = example.family.create_state(example.config, key)
    return state.replace(tx=TX, opt_state=TX.init(state.params))


def batches_of(example: Example, count: int) -> list[Any]:
    """Tokens that predict each other, so that there is something to learn."""
    config = example.config
    draw = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        first = draw.integers(0, config.vocab_size, (example.batch_size, 1))
        steps = draw.integers(1, 4, (example.batch_size, config.seq_len))
        tokens = (first + np.cumsum(steps, 1)) % config.vocab_size
        targets = np.roll(tokens, -1, 1)
        batches.append({"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32)})
    return batches


def trained(step: Any, state: Any, batches: Sequence[Any], num_steps: int) -> list[float]:
    losses = []
    for number in range(num_steps):
        state, loss = step(state, batches[number % len(batches)])
        losses.append(loss)
    return [float(loss) for loss in losses]


def compared(example: Example, method: Any, num_steps: int) -> tuple[Outcome, Any]:
    """The losses of a parallelized step, in rank 0 beside those of `jax.jit`."""
    batches = batches_of(example, 4)
    create = jax.jit(create_state, static_argnums=0)
    step = autopar.parallelize(example.train_step, method=method)
    losses = trained(step, create(example, jax.random.key(0)), batches, num_steps)
    found: Outcome = {"losses": losses, "mesh": step.last_executable.plan.mesh_shape}
    if jax.process_index() == 0:
        state = create(example, jax.random.key(0))
        found["wanted"] = trained(jax.jit(example.train_step), state, batches, num_steps)
    return found, step


# -- attention


NUM_HEADS = 8
HEADS = {
    "8": ShardParallel((8,), options=ShardingOptions(pins={"heads*": P("x")})),
    "2x4": ShardParallel(
        (2, 4), options=ShardingOptions(pins={"heads*": P("x", None, "y")}, batch_axis="x")
    ),
}


def attention_step(state: Any, batch: Any) -> Any:
    kind = "cudnn" if on_gpu() else "xla"

    def loss_of(params: Any) -> Any:
        parts = jnp.einsum("bsd,tdhe->tbshe", batch["x"], params["in"].astype(jnp.bfloat16))
        query, key, value = (autopar.constrain(part, f"heads{n}") for n, part in enumerate(parts))
        found = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kind)
        out = jnp.einsum("bshe,hed->bsd", found, params["out"].astype(jnp.bfloat16))
        return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 5.0 * g, state, grads), loss


def attention(mesh: str) -> Outcome:
    """Fused attention: split by batch on (8,), by batch and heads on (2, 4)."""
    size, seq_len = (512, 256) if on_gpu() else (64, 16)
    head_size, draw = size // NUM_HEADS, np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    state = {
        "in": normal(3, size, NUM_HEADS, head_size) / size**0.5,
        "out": normal(NUM_HEADS, head_size, size) / size**0.5,
    }
    x = normal(8, seq_len, size)
    batch = {"x": x.astype(jnp.bfloat16), "y": np.roll(x, 1, 1)}
    step = autopar.parallelize(attention_step, method=HEADS[mesh])
    found: Outcome = {"losses": trained(step, state, [batch], ATTENTION_STEPS)}
    if jax.process_index() == 0:
        found["wanted"] = trained(jax.jit(attention_step), state, [batch], ATTENTION_STEPS)
    kernels = attention_kernels(step.last_executable.hlo_text())
    return {**found, "kernels": kernels, "elements": x.size}


def attention_kernels(hlo: str) -> list[int]:
    """Elements of the first result of every cuDNN attention in a program."""
    calls = [line for line in hlo.splitlines() if 'custom_call_target="__cudnn$fmha' in line]
    shapes = [re.search(r"bf16\[([\d,]+)\]", line) for line in calls]
    return [prod(map(int, shape[1].split(","))) for shape in shapes if shape]


# -- small types


@jax.custom_vjp
def fp8_product(x: Any, w: Any) -> Any:
    return _fp8_forward(x, w)[0]


def _fp8_forward(x: Any, w: Any) -> Any:
    x, w = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
    return jnp.dot(x, w, preferred_element_type=jnp.float32), (x, w)


def _fp8_backward(saved: Any, given: Any) -> Any:
    """Uses nothing but the small arrays, so that these are what is gathered."""
    x, w = (array.astype(jnp.bfloat16) for array in saved)
    given = given.astype(jnp.bfloat16)
    wide = {"preferred_element_type": jnp.float32}
    return jnp.dot(given, w.T, **wide), jnp.dot(x.T, given, **wide)


fp8_product.defvjp(_fp8_forward, _fp8_backward)


def fp8_step(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        hidden = jnp.tanh(fp8_product(batch["x"], params["a"]))
        return jnp.mean((fp8_product(hidden, params["b"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.5 * g, state, grads), loss


def bf16_step(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        hidden = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["a"])
        return jnp.mean(((hidden @ params["b"]).astype(jnp.float32) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.5 * g, state, grads), loss


FSDP = ShardParallel((8,), options=ShardingOptions(batch_axis="x", pins={"state*": P("x")}))
SMALL_TYPES = {
    "bf16 data": (bf16_step, jnp.bfloat16, DataParallel()),
    "bf16 zero3": (bf16_step, jnp.bfloat16, Zero3Parallel()),
    "fp8 zero3": (fp8_step, jnp.float32, Zero3Parallel()),
    "fp8 pins": (fp8_step, jnp.float32, FSDP),
}


def small_types(name: str) -> Outcome:
    step_fn, dtype, method = SMALL_TYPES[name]
    size, num_rows = (512, 256) if on_gpu() else (64, 64)
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    state = {"a": normal(size, 2 * size), "b": normal(2 * size, size)}
    state = {name: (value / size**0.5).astype(dtype) for name, value in state.items()}
    batch = {"x": normal(num_rows, size), "y": normal(num_rows, size)}
    step = autopar.parallelize(step_fn, method=method)
    found: Outcome = {"losses": trained(step, state, [batch], 6)}
    found["collectives"] = sorted({(c.kind, c.dtype) for c in step.last_executable.collectives()})
    if jax.process_index() == 0:
        found["wanted"] = trained(jax.jit(step_fn), state, [batch], 6)
    return found


# -- memory


def memory(names: str) -> list[Outcome]:
    """Steps of large models, those with less memory first: the device's peak only rises. Data
    parallelism has about 1 GiB of state, the others about 1 GiB per rank."""
    plans = []
    for name in names.split(","):
        config = memory_config(name)
        example = gpt.example(config, 16)
        step = autopar.parallelize(example.train_step, method=METHODS[name])
        state = jax.eval_shape(lambda e=example: create_state(e, jax.random.key(0)))
        plan = step.plan(state, batches_of(example, 1)[0])
        plans.append((plan.estimated_peak_bytes, name, example, step))
    return [measured(name, example, step) for _, name, example, step in sorted(plans, key=first)]


def first(entry: tuple[float, str, Any, Any]) -> tuple[float, str]:
    return entry[0], entry[1]


def memory_config(name: str) -> gpt.GPTConfig:
    if not on_gpu():
        return gpt.GPTConfig(64, 1, 8, seq_len=16, vocab_size=128, dtype=jnp.bfloat16)
    size, num_layers = (2048, 1) if name == "data" else (4096, 3)
    return gpt.GPTConfig(
        size, num_layers, 32, seq_len=256, vocab_size=16384, dtype=jnp.bfloat16, attention="cudnn"
    )


def measured(name: str, example: Example, step: Any) -> Outcome:
    (batch,) = batches_of(example, 1)
    create = autopar.parallelize(
        lambda key: create_state(example, key),
        method=autopar.CreateStateParallel(step, batch),
    )
    state = create(jax.random.key(0))
    stats = device_bytes()
    were_deleted = []
    for _ in range(3):
        old = jax.tree.leaves(state)
        state, loss = step(state, batch)
        were_deleted.append(all(leaf.is_deleted() for leaf in old))
    del old
    jax.block_until_ready((state, loss))
    shares = [shard_bytes(leaf) for leaf in jax.tree.leaves(state)]
    live = [shard_bytes(array) for array in jax.live_arrays()]
    found = {
        "method": name,
        "were_deleted": were_deleted,
        "loss": float(loss),
        "state_bytes": sum(shares),
        "live_bytes": sum(live),
        "whole_state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "plan_peak_bytes": step.last_executable.plan.estimated_peak_bytes,
        "xla_peak_bytes": step.last_executable.memory_bytes(),
        "before": stats,
        "after": device_bytes(),
    }
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    return found


def shard_bytes(array: jax.Array) -> int:
    """Bytes on the devices of this process. Does not ask for the shards, which would be new arrays
    on the same buffers."""
    shard = array.sharding.shard_shape(array.shape)
    return prod(shard) * array.dtype.itemsize * len(array.sharding.addressable_devices)


def device_bytes() -> dict[str, int]:
    """Empty on a CPU, which does not count."""
    stats = jax.local_devices()[0].memory_stats() or {}
    names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
    return {name: stats[name] for name in names if name in stats}


# -- orders of devices

ORDERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "reversed": lambda devices: devices[::-1],
    "interleaved": lambda devices: devices[::2] + devices[1::2],
}


def exact_step(state: Any, batch: Any) -> Any:
    """Of small whole numbers, so that sums are exact in any order."""

    def loss_of(params: Any) -> Any:
        return jnp.sum((batch["x"] @ params["a"]) @ params["b"] * batch["y"])

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - g, state, grads), loss


def order(name: str) -> list[Outcome]:
    """Every shard of the new state, and the loss, on meshes of devices in another order."""
    draw = np.random.default_rng(0)

    def whole_numbers(*shape: int) -> np.ndarray:
        return draw.integers(-1, 2, shape).astype(np.float32)

    state = {"a": whole_numbers(16, 8), "b": whole_numbers(8, 16)}
    batch = {"x": whole_numbers(8, 16), "y": whole_numbers(8, 16)}
    wanted, wanted_loss = jax.jit(exact_step)(state, batch)
    wanted = jax.tree.map(np.asarray, wanted)
    autopar.init(devices=ORDERS[name](list(autopar.api.local_devices())))
    try:
        return [
            ordered(shape, state, batch, wanted, float(wanted_loss)) for shape in ((2, 4), (4, 2))
        ]
    finally:
        autopar.shutdown()


def ordered(
    shape: tuple[int, int], state: Any, batch: Any, wanted: Any, wanted_loss: float
) -> Outcome:
    pins = {"state['a']": P("x", "y"), "state['b']": P("y", "x")}
    method = ShardParallel(shape, options=ShardingOptions(pins=pins, batch_axis="x"))
    step = autopar.parallelize(exact_step, method=method)
    new, loss = step(state, batch)
    shards = [
        (shard.device.id, bool(np.array_equal(shard.data, wanted[name][shard.index])))
        for name, array in new.items()
        for shard in array.addressable_shards
    ]
    sizes = {name: array.addressable_shards[0].data.shape for name, array in new.items()}
    return {
        "shape": shape,
        "devices": [device.id for device in step.last_executable.mesh.devices.flat],
        "shards": shards,
        "sizes": sizes,
        "loss": float(loss),
        "wanted_loss": wanted_loss,
    }


# -- many steps


def losses(name: str) -> Outcome:
    """The losses of many steps: `METHOD DTYPE STEPS`."""
    method, dtype, num_steps = name.split()
    size, num_layers, seq_len = (64, 2, 32) if on_gpu() else (32, 1, 8)
    config = gpt.GPTConfig(size, num_layers, 8, seq_len, vocab_size=128, dtype=jnp.dtype(dtype))
    count = int(num_steps) if on_gpu() else min(int(num_steps), 12)
    with jax.default_matmul_precision("highest"):
        found, step = compared(gpt.example(config, 16), METHODS[method], count)
    return {**found, "collectives": len(step.last_executable.collectives())}


# -- out of memory


def out_of_memory(_: str) -> Outcome:
    """One rank fills its memory, then all go on. Does not return in any of them."""
    size = 1024 if on_gpu() else 64
    # On a GPU, a step takes several times as much memory as is left of a full one.
    config = gpt.GPTConfig(size, 2, 8, seq_len=size // 2, vocab_size=8 * size, dtype=jnp.bfloat16)
    example = gpt.example(config, 16)
    (batch,) = batches_of(example, 1)
    step = autopar.parallelize(example.train_step, method=DataParallel())
    state = jax.jit(create_state, static_argnums=0)(example, jax.random.key(0))
    for _ in range(2):
        state, loss = step(state, batch)
    note({"check": "out_of_memory", "loss": float(loss), "pid": os.getpid()})
    if jax.process_index() == FAILING_RANK:
        kept = fill_memory(step)
        note({"check": "filled", "bytes": sum(map(shard_bytes, kept)), "left": device_bytes()})
    began_s = time.time()
    try:
        for _ in range(3):
            state, loss = step(state, batch)
            loss.block_until_ready()
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        said = {"error": type(error).__name__, "message": str(error)[:2000], "notes": notes}
        note({"check": "raised", **said, "seconds": time.time() - began_s})
        raise
    return {"loss": float(loss)}


def fill_memory(step: Any) -> list[jax.Array]:
    """Takes what is left of this rank's memory. A CPU has no limit: its program says that it has
    reached one."""
    kept = []
    if not on_gpu():

        def refuse(*_: Any) -> Any:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating a lot.")

        step.last_executable.compiled = refuse
        return kept
    for num_bytes in (2**30, 2**26):
        while free_bytes() > 2 * num_bytes:
            try:
                kept.append(jnp.ones(num_bytes, jnp.int8).block_until_ready())
            except jax.errors.JaxRuntimeError as error:  # no free block is that large
                assert "RESOURCE_EXHAUSTED" in str(error), error
                break
    return kept


def free_bytes() -> int:
    stats = device_bytes()
    return stats["bytes_limit"] - stats["bytes_in_use"]


CHECKS: dict[str, Callable[[str], Outcome | list[Outcome]]] = {
    "memory": memory,
    "attention": attention,
    "small_types": small_types,
    "order": order,
    "losses": losses,
    "out_of_memory": out_of_memory,
}


def main() -> None:
    _arguments["folder"] = Path(sys.argv[1])
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize()
    for check in sys.argv[2:]:
        name, _, argument = check.partition(":")
        start = time.monotonic()
        outcomes = CHECKS[name](argument)
        for outcome in outcomes if isinstance(outcomes, list) else [outcomes]:
            note({"check": check, **outcome, "seconds": time.monotonic() - start})


if __name__ == "__main__":
    main()
