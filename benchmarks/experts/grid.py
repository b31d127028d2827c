"""The candidates of the experts: every layout that fits a model and a cluster, with its knobs.

    Example, devices, devices per host → Expert …

Candidates form *chains*: the same layout with more and more recomputation, or with more and more
micro-batches. The first of a chain that fits in memory is its fastest, since all after it do more
work; `tuning.best_of_families` stops there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from examples.models import Example, dlrm, moe, wide_resnet

from . import images, mixtures, recommenders, transformers
from .accumulation import can_accumulate, rows_together
from .expert import Expert
from .handwritten import HandWritten
from .pipelines import pipelines
from .remat import KINDS

DATA = "data parallel"
ZERO2 = "ZeRO-2"
FSDP = "FSDP"
HSDP = "HSDP"
TENSOR = "Megatron"
TENSOR_SEQUENCE = "Megatron + sequence"
FSDP_TENSOR = "FSDP + TP"
EXPERTS = "expert parallel"
CHANNELS = "channels"
TABLES = "table parallel"
PIPELINE = "3-D by hand"
MICRO_BATCHES = (2, 4, 8)

Chain = list[Expert]


def experts_for(
    example: Example, num_devices: int, devices_per_host: int, *, scan_layers: bool = False
) -> list[Expert]:
    """All candidates for this model and number of devices. With `scan_layers`, layers are stacked
    where possible, which compiles fast."""
    found = chains_for(example, num_devices, devices_per_host, scan_layers=scan_layers)
    return [expert for chain in found for expert in chain]


def plain_experts(example: Example, num_devices: int, *, scan_layers: bool = False) -> list[Expert]:
    """Every layout on one host without recomputation, micro-batches or a pipeline."""
    found = experts_for(example, num_devices, num_devices, scan_layers=scan_layers)
    plain = [expert for expert in found if expert.layout is not None]
    return [e for e in plain if e.remat == "none" and e.num_micro_batches == 1]


def families_in_turns(experts: Iterable[Expert]) -> list[Expert]:
    """One of each family first, so that none is missing if time runs out."""
    families: dict[str, list[Expert]] = {}
    for expert in experts:
        families.setdefault(expert.family, []).append(expert)
    turns = itertools.zip_longest(*families.values())
    return [expert for turn in turns for expert in turn if expert is not None]


def chains_for(
    example: Example, num_devices: int, devices_per_host: int, *, scan_layers: bool = False
) -> list[Chain]:
    """The same as chains; pipelines come last."""
    scanned = scan_layers and hasattr(example.config, "scan_layers")
    chains = []
    for family, layout in layouts_for(example, num_devices, devices_per_host):
        chains += _chains(example, family, layout, scanned)
    return [*chains, *pipelines(example, num_devices, devices_per_host, PIPELINE)]


def layouts_for(
    example: Example, num_devices: int, devices_per_host: int
) -> list[tuple[str, HandWritten]]:
    """(family, layout) pairs that divide the model's sizes and its batch."""
    config = example.config
    if isinstance(config, wide_resnet.WideResNetConfig):
        found = _image_layouts(config, num_devices, devices_per_host)
    elif isinstance(config, dlrm.DLRMConfig):
        found = _recommender_layouts(config, num_devices, devices_per_host)
    elif isinstance(config, moe.MoEConfig):
        found = _mixture_layouts(config, num_devices, devices_per_host)
    else:
        found = _transformer_layouts(config, num_devices, devices_per_host)
    return [(family, layout) for family, layout in found if _splits_batch(example, layout)]


def _splits_batch(example: Example, layout: HandWritten) -> bool:
    data, tensor = layout.mesh_shape
    ranks = data * tensor if isinstance(layout.batch[0], tuple) else data
    return example.batch_size % (ranks * rows_together(example)) == 0


def _tensor_degrees(num_devices: int, devices_per_host: int) -> list[int]:
    """Tensor parallelism stays inside a host."""
    most = min(num_devices, devices_per_host)
    return [n for n in (2, 4, 8, 16) if n <= most and most % n == 0]


def _transformer_layouts(
    config: Any, num_devices: int, per_host: int
) -> Iterator[tuple[str, HandWritten]]:
    yield DATA, transformers.data_parallel(num_devices)
    yield ZERO2, transformers.zero2(num_devices)
    yield FSDP, transformers.fsdp(num_devices)
    if num_devices > per_host > 1:
        yield HSDP, transformers.hsdp(num_devices // per_host, per_host)
    vocab = getattr(config, "vocab_size", 0)
    heads = getattr(config, "num_kv_heads", config.num_heads)
    for tensor in _tensor_degrees(num_devices, per_host):
        if heads % tensor or config.seq_len % tensor:
            continue
        data = num_devices // tensor
        for family, sequence in ((TENSOR, False), (TENSOR_SEQUENCE, True)):
            yield (
                family,
                transformers.megatron(
                    data, tensor, sequence=sequence, split_moments=data > 1, vocab_size=vocab
                ),
            )
        if data > 1:
            yield (
                FSDP_TENSOR,
                transformers.megatron(data, tensor, sequence=True, zero=True, vocab_size=vocab),
            )


def _mixture_layouts(
    config: moe.MoEConfig, num_devices: int, per_host: int
) -> Iterator[tuple[str, HandWritten]]:
    for family, layout in _transformer_layouts(config, num_devices, per_host):
        splits_experts = family in (TENSOR, TENSOR_SEQUENCE, FSDP_TENSOR)
        if not (splits_experts and config.num_experts % layout.mesh_shape[0]):
            yield family, layout
    if not config.num_experts % num_devices:
        yield EXPERTS, mixtures.expert_parallel(num_devices, zero=False)
        yield EXPERTS, mixtures.expert_parallel(num_devices, zero=False, split_moments=True)
        yield EXPERTS, mixtures.expert_parallel(num_devices, zero=True)
    for inside in _tensor_degrees(num_devices, per_host):
        data = num_devices // inside
        ffn = config.ffn_multiplier * config.hidden_size
        if data > 1 and not config.num_experts % inside and not ffn % data:
            yield EXPERTS, mixtures.experts_in_hosts(data, inside)
    num_hosts = num_devices // per_host
    ffn = config.ffn_multiplier * config.hidden_size
    if num_hosts > 1 and not config.num_experts % num_hosts and not ffn % per_host:
        yield EXPERTS, mixtures.experts_across_hosts(num_hosts, per_host)


def _sample_layouts(num_devices: int, per_host: int) -> Iterator[tuple[str, HandWritten]]:
    """Layouts that split only samples and parameters, for networks that are no transformers."""
    yield DATA, images.image_data_parallel(num_devices)
    yield ZERO2, images.image_zero2(num_devices)
    yield FSDP, images.image_fsdp(num_devices)
    if num_devices > per_host > 1:
        yield HSDP, images.image_hsdp(num_devices // per_host, per_host)


def _image_layouts(
    config: wide_resnet.WideResNetConfig, num_devices: int, per_host: int
) -> Iterator[tuple[str, HandWritten]]:
    yield from _sample_layouts(num_devices, per_host)
    for tensor in _tensor_degrees(num_devices, per_host):
        data = num_devices // tensor
        if not config.base_channels % tensor and not config.base_channels % data:
            yield CHANNELS, images.image_channels(data, tensor)


def _recommender_layouts(
    config: dlrm.DLRMConfig, num_devices: int, per_host: int
) -> Iterator[tuple[str, HandWritten]]:
    yield from _sample_layouts(num_devices, per_host)
    sizes: dict[recommenders.Dimension, int] = {
        "tables": config.num_tables,
        "rows": config.table_rows,
        "features": config.table_dim,
    }
    for dimension, size in sizes.items():
        if size % num_devices == 0:
            for zero in (False, True):
                yield TABLES, recommenders.table_parallel(num_devices, dimension, zero=zero)


def _chains(example: Example, family: str, layout: HandWritten, scanned: bool) -> list[Chain]:
    kinds = KINDS if hasattr(example.config, "remat") else ("none",)
    again = [_expert(family, layout, scanned, kind, 1) for kind in kinds]
    chains = [again]
    if can_accumulate(example):
        data, tensor = layout.mesh_shape
        ranks = data * tensor if isinstance(layout.batch[0], tuple) else data
        rows = example.batch_size // (ranks * rows_together(example))
        parts = [n for n in MICRO_BATCHES if rows % n == 0]
        if parts:
            chains.append([_expert(family, layout, scanned, "none", n) for n in parts])
            again += [_expert(family, layout, scanned, "full", n) for n in parts]
    return chains


def _expert(family: str, layout: HandWritten, scanned: bool, remat: str, parts: int) -> Expert:
    words = [layout.name]
    words += ["scanned"] * scanned
    words += [] if remat == "none" else [f"remat {remat}"]
    words += [] if parts == 1 else [f"{parts} micro-batches"]
    return Expert(", ".join(words), family, layout, scanned, remat, parts)
