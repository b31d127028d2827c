"""3-D by hand: tensor parallelism inside a host, pipeline stages of whole hosts, data parallelism.

    Example, devices, devices per host → chains of `Expert`s with a `method` for autopar

Stages have equally many layers. Inside a stage, kernels are split over "y" as in Megatron, and the
optimizer's moments also over "x". The products' outputs are pinned: heads and features over "y"
after column-split kernels, the residual stream along the sequence after row-split ones, whole
sequences after norms. autopar only decides what follows from that: biases and norms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P

import autopar
from examples.models import Example, gpt, llama

from .expert import Expert
from .handwritten import intercept_nnx

MICRO_BATCHES_PER_STAGE = 8  # so 1F1B waits at most an eighth of the time
_COLUMN = ("qkv", "query", "key", "value", "up", "gate", "lm_head")
_ROW = ("out", "down")
_NORMS = ("attention_norm", "ffn_norm", "final_norm")


def pipelines(
    example: Example, num_devices: int, devices_per_host: int, family: str
) -> Iterator[list[Expert]]:
    """Two stages, and one per host, with tensor parallelism over a host or half of it; each with
    and without recomputation."""
    config = example.config
    if not isinstance(config, (gpt.GPTConfig, llama.LlamaConfig)) or config.scan_layers:
        return
    num_hosts = max(1, num_devices // devices_per_host)
    heads = getattr(config, "num_kv_heads", config.num_heads)
    for num_stages in sorted({2, num_hosts} - {1}):
        if num_hosts % num_stages or config.num_layers % num_stages:
            continue
        submesh = (num_hosts // num_stages, devices_per_host)
        for tensor in (devices_per_host // 2, devices_per_host):
            data = submesh[0] * devices_per_host // max(tensor, 1)
            # A micro-batch has a row per data-parallel device, and at least two: with a single
            # row, autopar cannot tell the batch from other dimensions of size one.
            rows = max(data, 2)
            most = min(MICRO_BATCHES_PER_STAGE * num_stages, example.batch_size // rows)
            sizes = (heads, config.seq_len, config.vocab_size)
            if tensor < 2 or any(size % tensor for size in sizes):
                continue
            if most < 1 or example.batch_size % (data * most):
                continue
            yield [
                _expert(example, family, num_stages, submesh, tensor, most, remat)
                for remat in ("none", "all")
            ]


def _expert(
    example: Example,
    family: str,
    num_stages: int,
    submesh: tuple[int, int],
    tensor: int,
    num_micro_batches: int,
    remat: str,
) -> Expert:
    data = submesh[0] * submesh[1] // tensor
    layers = example.config.num_layers
    each = layers // num_stages
    stages = autopar.ManualStages(
        [list(range(stage * each, (stage + 1) * each)) for stage in range(num_stages)],
        [submesh] * num_stages,
        [(data, tensor)] * num_stages,
    )
    method = autopar.PipeshardParallel(
        num_micro_batches,
        layers=autopar.AutoLayers(layers),
        stages=stages,
        options=autopar.ShardingOptions(pins=pins(example), batch_axis="x", remat=remat),
    )
    name = f"{num_stages} stages of {data}×{tensor}, {num_micro_batches} micro-batches"
    name += ", remat full" if remat == "all" else ""
    return Expert(name, family, num_micro_batches=num_micro_batches, method=method, wrap=naming)


def pins(example: Example, *, split_parameters: bool = False) -> dict[str, P]:
    """Pins for kernels and moments, by their paths, and for values, by their names. With
    `split_parameters`, kernels are split like their moments, as FSDP does."""
    stacked = (None,) if getattr(example.config, "scan_layers", False) else ()
    leaves = jax.tree.leaves_with_path(example.abstract_state().params)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    split, stream, whole = P("x", None, "y"), P("x", "y", None), P("x", None, None)
    kinds = [
        (_COLUMN, "kernel", P(None, "y"), P("x", "y"), split),
        (_ROW, "kernel", P("y", None), P("y", "x"), stream),
        (("embed",), "embedding", P("y", None), P("y", None), None),
        (_NORMS, "scale", None, None, whole),
    ]
    found = {"by hand: logits": split}
    for names, leaf, parameter, moment, value in kinds:
        for name in names:
            if not any(f"['{name}']['{leaf}']" in path for path in paths):
                continue
            if parameter is not None and moment is not None:
                rows = () if name in ("embed", "lm_head") else stacked
                kept = moment if split_parameters else parameter
                found[f"state.params*['{name}']['{leaf}']*"] = P(*rows, *kept)
                found[f"state.opt_state*['{name}']['{leaf}']*"] = P(*rows, *moment)
            if value is not None and name != "lm_head":
                found[f"by hand: {name}"] = value
    return found


def naming(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, with names on the outputs of the modules in `pins`."""
    named = {*_COLUMN, *_ROW, *_NORMS, "logits"}

    def name_value(out: Any, name: str) -> Any:
        name = "logits" if name == "lm_head" else name
        return autopar.constrain(out, f"by hand: {name}") if name in named else out

    def interceptor(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = next_fun(*args, **kwargs)
        if context.method_name == "attend":
            return name_value(out, "logits")
        is_call = context.method_name == "__call__"
        return name_value(out, context.module.name or "") if is_call else out

    def step(state: Any, batch: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(nn.intercept_methods(interceptor))
            stack.enter_context(intercept_nnx(name_value))
            return train_step(state, batch)

    return step
