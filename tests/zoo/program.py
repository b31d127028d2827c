"""A name → a train step as JAX users write it, small enough to run or as large as in practice.

Modules of `tests.zoo.packages` and `tests.zoo.written` register functions from a `Size` to a
`ZooStep`:

    @zoo_program("vit", source="written", layers=True)
    def vit(size: Size) -> ZooStep: ...

Steps know nothing of autopar. A package that may be missing is imported inside the function and
named by `packages=`, so that all programs can be listed without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Size(Enum):
    """SMALL runs on simulated devices in seconds. REAL is what people train, with a batch for eight
    GPUs; it is only ever traced as shapes. ONE_GPU has the widths of REAL, but few layers and a
    batch for one GPU: a step of tens of milliseconds, compiled in seconds. Programs that no
    benchmark runs on one GPU have REAL's size there."""

    SMALL = "small"
    REAL = "real"
    ONE_GPU = "one GPU"

    @property
    def is_small(self) -> bool:
        return self is Size.SMALL


@dataclass(frozen=True)
class ZooStep:
    """A train step of one device, and what it is called with.

    step:       `step(state, *batch) -> (state, metrics)`; metrics are arrays, the loss among them.
    make_state: makes the first state; `jax.eval_shape(make_state)` must work.
    make_batch: makes the tuple of batch arguments of call i; it can be traced as well.
    """

    step: Callable[..., tuple[Any, Any]]
    make_state: Callable[[], Any]
    make_batch: Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class ZooProgram:
    """A registered program, and how its results are compared.

    source:        "written", or the package it shows.
    layers:        it has layers, so it is checked as a pipeline of two stages too.
    packages:      modules that must be importable.
    rtol, atol:    of parameters, optimizer state and metrics against one device.
    micro_batches: of the pipeline. 1 where the loss is no mean over rows (a loss across the batch,
                   BatchNorm), because micro-batches would change it.
    meshes:        of `ShardParallel`.
    x64:           it runs under `jax.enable_x64`.
    fails:         method ("8", "2x4", "stages" or "plan") → what is known to fail; a strict xfail.
    """

    name: str
    build: Callable[[Size], ZooStep]
    source: str
    layers: bool = False
    packages: tuple[str, ...] = ()
    rtol: float = 1e-3
    atol: float = 1e-4
    micro_batches: int = 2
    meshes: tuple[tuple[int, ...], ...] = ((8,), (2, 4))
    x64: bool = False
    fails: Mapping[str, str] = field(default_factory=dict, hash=False)

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


_PROGRAMS: dict[str, ZooProgram] = {}

Build = Callable[[Size], ZooStep]


def zoo_program(name: str, *, source: str, **options: Any) -> Callable[[Build], Build]:
    """Registers the decorated function as a program; options are the fields of `ZooProgram`."""

    def register(build: Build) -> Build:
        program = ZooProgram(name, build, source, **options)
        if name in _PROGRAMS:
            raise ValueError(f"the zoo has two programs {name!r}")
        _PROGRAMS[name] = program
        return build

    return register


def all_programs() -> dict[str, ZooProgram]:
    """All programs by name: those of packages first, then by module and order of definition."""
    for family in ("tests.zoo.packages", "tests.zoo.written"):
        folder = importlib.import_module(family)
        for module in sorted(info.name for info in pkgutil.iter_modules(folder.__path__)):
            importlib.import_module(f"{family}.{module}")
    # Whichever module was imported first by others.
    return dict(sorted(_PROGRAMS.items(), key=lambda entry: entry[1].build.__module__))
