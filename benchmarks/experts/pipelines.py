"""3-D by hand: tensor parallelism in the host, pipeline stages of whole hosts, data parallelism.

    Example, devices, devices per host → Expert …, whose `method` autopar carries out

Stages have equally many layers. In a stage kernels are split as Megatron does, over "y", the
optimizer's moments over "x" too, and the outputs of column-split kernels and the residual stream
are pinned. What is left to autopar is what nothing depends on: biases and norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import autopar
from examples.models import Example, gpt, llama

from .expert import Expert

_COLUMN = ("qkv", "query", "key", "value", "up", "gate", "lm_head")
_ROW = ("out", "down")
MICRO_BATCHES_PER_STAGE = 8  # 1F1B then waits an eighth of the time at most


def pipelines(
    example: Example, num_devices: int, devices_per_host: int, family: str
) -> Iterator[list[Expert]]:
    """Two stages, and one per host, with tensor parallelism in a host or half of it; each as it is
    and with layers computed again."""
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
            most = min(MICRO_BATCHES_PER_STAGE * num_stages, example.batch_size // data)
            if tensor < 2 or heads % tensor or example.batch_size % (data * most):
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
        options=autopar.ShardingOptions(pins=_pins(example, data), batch_axis="x", remat=remat),
    )
    name = f"{num_stages} stages of {data}×{tensor}, {num_micro_batches} micro-batches"
    name += ", remat full" if remat == "all" else ""
    return Expert(name, family, num_micro_batches=num_micro_batches, method=method)


def _pins(example: Example, data: int) -> dict[str, Any]:
    """Of kernels and moments, by the paths that the model has."""
    leaves = jax.tree.leaves_with_path(example.abstract_state().params)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    other = "x" if data > 1 else None
    pins: dict[str, Any] = {}
    for names, spec, moment in (
        (_COLUMN, P(None, "y"), P(other, "y")),
        (_ROW, P("y", None), P("y", other)),
    ):
        for name in names:
            if any(f"['{name}']['kernel']" in path for path in paths):
                pins[f"state.params*['{name}']['kernel']*"] = spec
                pins[f"state.opt_state*['{name}']['kernel']*"] = moment
    return pins
