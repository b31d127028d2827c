"""Which models the suite compares on which devices: data, and the `Example`s made from it.

A `Row` is one line of a table: a model, a number of devices and each device's share of the batch.
All plans of a row have the same model code, depth and batch. Parameters and optimizer state are
float32, activations and products bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import ArgumentError, near_names

DEVICES_PER_HOST = 8
QUICK_LAYERS = 2
FAMILIES = ("gpt", "llama", "moe", "bert", "wresnet")


@dataclass(frozen=True)
class Row:
    """`per_device`: sequences or images of the batch; `config`: changed fields of the config;
    `layers`: another depth than the model's (for a Wide-ResNet, at most so many blocks of a
    stage)."""

    model: str
    devices: int
    per_device: int
    config: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None

    @property
    def family(self) -> str:
        return next(name for name in FAMILIES if self.model.startswith(name))

    @property
    def name(self) -> str:
        depth = "" if self.layers is None else f"-{self.layers}layers"
        return f"{self.model}-{self.devices}{depth}"

    @property
    def hosts(self) -> tuple[int, int]:
        """(hosts, devices on each)."""
        num_hosts = max(1, self.devices // DEVICES_PER_HOST)
        return num_hosts, self.devices // num_hosts


_LLAMA = {"seq_len": 2048}
H100_ROWS: tuple[Row, ...] = (
    Row("gpt-2.6b", 8, 8),
    Row("llama3-8b", 8, 2, _LLAMA),
    Row("moe-10b", 8, 8),
    Row("bert-large", 8, 32),
    Row("wresnet-2b", 8, 24),
    Row("gpt-6.7b", 16, 4),
    Row("llama2-13b", 16, 1, _LLAMA),
    Row("moe-10b", 16, 8),
    Row("bert-large", 16, 32),
    Row("wresnet-4b", 16, 16),
    Row("gpt-15b", 64, 2),
    Row("llama2-13b", 64, 2, _LLAMA),
    Row("moe-27b", 64, 8),
    Row("bert-large", 64, 32),
    Row("wresnet-6.8b", 64, 8),
)
QUICK_ROWS: tuple[Row, ...] = (
    Row("gpt-2.6b", 8, 8, layers=QUICK_LAYERS),
    Row("moe-10b", 8, 8, layers=QUICK_LAYERS),
)


def cpu_rows(quick: bool = False) -> list[Row]:
    """The rows measured on virtual CPU devices: small models of the same families."""
    from benchmarks.experts.measured_cpu import MODELS, NUM_DEVICES

    found = [
        Row(name, NUM_DEVICES, batch_size // NUM_DEVICES, config)
        for name, (_, batch_size, config) in MODELS.items()
    ]
    return found[:1] if quick else found


def check_names(rows: Sequence[Row], models: Sequence[str], devices: Sequence[int]) -> None:
    """Raises if no row has one of these models (names or families) or numbers of devices."""
    names = sorted({row.model for row in rows} | {row.family for row in rows})
    for name in models:
        if name not in names:
            raise ArgumentError(
                f"--models {name}: no row has this model{near_names(name, names)}. Choose from "
                f"{', '.join(names)}."
            )
    numbers = sorted({row.devices for row in rows})
    for number in devices:
        if number not in numbers:
            raise ArgumentError(
                f"--devices {number}: no row has this number of devices; choose from "
                f"{', '.join(map(str, numbers))}."
            )
    if not chosen_rows(rows, models, devices):
        raise ArgumentError(
            f"--models {','.join(models)} --devices {','.join(map(str, devices))}: no row has "
            "both. `autopar bench --list` shows the rows."
        )


def chosen_rows(
    rows: Sequence[Row],
    models: Sequence[str] = (),
    devices: Sequence[int] = (),
    layers: int | None = None,
) -> list[Row]:
    """The rows of these models and numbers of devices, at another depth if one is given."""
    found = [
        row
        for row in rows
        if (not models or row.model in models or row.family in models)
        and (not devices or row.devices in devices)
    ]
    return found if layers is None else [replace(row, layers=layers) for row in found]


def example_of(row: Row) -> Any:
    """The model of a row for H100s, at its depth and batch."""
    import jax.numpy as jnp

    from examples.models import build

    example = build(row.model, row.per_device * row.devices, dtype=jnp.bfloat16, **row.config)
    if row.layers is None:
        return example
    if row.family == "wresnet":
        sizes = example.config.stage_sizes
        return example.replace(stage_sizes=tuple(min(size, row.layers) for size in sizes))
    return example.replace(num_layers=row.layers)
