"""The measured steps: names → `ZooStep`s with a batch for one GPU.

Models have the width of real ones but few layers: a step takes 5 to 150 ms on an H200 and compiles
in seconds. `HELD_OUT` (`unmeasured`) decides nothing: it was written down before any of its models
was measured, and no constant of judge or planner may be chosen by its rows. Those of
`FORMERLY_HELD_OUT` and `STUDIED` (`unseen` among them) had that part before, one after the other;
since the causes of their errors were looked for in their programs, they decide too.

The three examples at real size are measured apart, as autopar runs them (`example_cases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from benchmarks.judge_h200.unmeasured import UNMEASURED
from benchmarks.judge_h200.unseen import UNSEEN, Unseen
from tests.zoo.program import Size, ZooStep, all_programs

if TYPE_CHECKING:
    from examples.models import Example


@dataclass(frozen=True)
class Case:
    """A named step; `make` builds it at real width, or tiny for a dry run. `planned`: it runs as
    autopar plans and rewrites it."""

    name: str
    held_out: bool
    make: Callable[[bool], ZooStep]
    planned: bool = False


def _zoo(name: str, tiny: bool) -> ZooStep:
    return all_programs()[name].build(Size.SMALL if tiny else Size.ONE_GPU)


def _example(name: str, tiny_name: str, rows: int, tiny: bool, **config: Any) -> ZooStep:
    build = import_module("examples.models").build
    return _step_of(build(tiny_name) if tiny else build(name, rows, **config))


def _step_of(example: Example) -> ZooStep:
    return ZooStep(example.train_step, example.create_state, lambda _: (example.make_batch(),))


def _strange(name: str) -> Callable[..., ZooStep]:
    """Imported late, as all that needs more packages than JAX."""
    return getattr(import_module("benchmarks.planning_zoo.strangers"), name)


def _t5(tiny: bool) -> ZooStep:
    if tiny:
        return _strange("t5")(1, 32, 2, 48, 4, length=16, out=8)
    return _strange("t5")(2, 1024, 16, 2816, 32)


def _linen_gpt(tiny: bool) -> ZooStep:
    if tiny:
        return _strange("linen_gpt")(1, 32, 2, 4, length=16, vocabulary=64)
    return _strange("linen_gpt")(2, 2048, 16, 4)


def _scanned_llama(tiny: bool) -> ZooStep:
    if tiny:
        return _strange("scanned_llama")(2, 64, 8, 96, 2, length=16)
    return _strange("scanned_llama")(4, 2048, 16, 5504, 2, length=2048)


_GPT = {"num_layers": 4, "num_heads": 16}

DEVELOPMENT: dict[str, Callable[[bool], ZooStep]] = {
    "gpt": lambda tiny: _example("gpt-1.3b", "gpt-tiny", 8, tiny, **_GPT),
    "vit": partial(_zoo, "vit"),
    "llama, grouped queries": lambda tiny: _example(
        "llama3-8b", "llama-tiny", 2, tiny, num_layers=2, seq_len=2048
    ),
    "t5": _t5,
    "mixer": partial(_zoo, "mixer"),
    "u-net": partial(_zoo, "unet"),
    "convnext": partial(_zoo, "convnext"),
    "lstm": partial(_zoo, "lstm"),
    "mamba": partial(_zoo, "mamba"),
    "dlrm": partial(_zoo, "dlrm"),
    "moe, einsum": lambda tiny: _example("moe-380m", "moe-tiny", 8, tiny, num_layers=4),
    "gnn": partial(_zoo, "gnn"),
    "vae": partial(_zoo, "vae"),
    "fnet": partial(_zoo, "fnet"),
    "lora": partial(_zoo, "lora"),
    "scanned llama": _scanned_llama,
    "pinn": partial(_zoo, "pinn"),
    "ppo": partial(_zoo, "ppo"),
}

FORMERLY_HELD_OUT: dict[str, Callable[[bool], ZooStep]] = {
    "bert": lambda tiny: _example("bert-large", "bert-tiny", 32, tiny, num_layers=4),
    "wide resnet": lambda tiny: _example(
        "wresnet-250m", "wresnet-tiny", 16, tiny, stage_sizes=(1, 2, 2, 1)
    ),
    "dit": partial(_zoo, "dit"),
    "clip": partial(_zoo, "clip"),
    "rwkv": partial(_zoo, "rwkv"),
    "nerf": partial(_zoo, "nerf"),
    "moe, capacity": partial(_zoo, "moe-capacity"),
    "linen gpt, float32": _linen_gpt,
    "3-d convolutions": partial(_zoo, "conv3d"),
    "graph attention": partial(_zoo, "gat"),
    "fourier operator": partial(_zoo, "fno"),
    "resnet, batch norm": partial(_zoo, "resnet-bn"),
    "sliding window": partial(_zoo, "sliding-window"),
    "two towers": partial(_zoo, "two-towers"),
    "flow": partial(_zoo, "flow"),
    "long convolution": partial(_zoo, "long-convolution"),
    "gan": partial(_zoo, "gan"),
    "ensemble": partial(_zoo, "ensemble"),
}


def _newcomer(name: str, rows: int, small: dict[str, int], tiny: bool) -> ZooStep:
    make = getattr(import_module("benchmarks.memory_zoo.newcomers"), name)
    return make(2, **small) if tiny else make(rows)


STUDIED: dict[str, Callable[[bool], ZooStep]] = {
    "perceiver": partial(_newcomer, "perceiver", 8, {"width": 32, "num_latents": 8, "depth": 1}),
    "moe, dropless": partial(_zoo, "moe-dropless"),
    "pixel cnn": partial(_newcomer, "pixel_cnn", 16, {"channels": 8, "depth": 2, "size": 8}),
    "fp8": partial(_zoo, "fp8"),
    "swin": partial(_newcomer, "swin", 32, {"width": 16}),
    "transducer": partial(_newcomer, "transducer", 8, {"width": 16, "frames": 8, "labels": 4}),
    "muon": partial(_zoo, "optax-muon"),
    "hyena": partial(_newcomer, "hyena", 16, {"width": 16, "length": 32, "depth": 1}),
    "linear attention": partial(
        _newcomer, "linear_attention", 8, {"width": 64, "length": 256, "depth": 1}
    ),
    "clustered views": partial(_zoo, "swav"),
    "adafactor": partial(_zoo, "optax-adafactor"),
    "averaged weights": partial(_zoo, "ema"),
    "neural ode": partial(_zoo, "neural-ode"),
    "meta-learning": partial(_zoo, "maml"),
    "q-learning": partial(_zoo, "dqn"),
    "experts, ragged": partial(_zoo, "moe-ragged-dot"),
    "branches": partial(_zoo, "switch"),
    "equilibrium": partial(_zoo, "equilibrium"),
}


def _of_rows(step: Unseen, tiny: bool) -> ZooStep:
    make, rows, small = step
    return make(2, **small) if tiny else make(rows)


STUDIED |= {name: partial(_of_rows, step) for name, step in UNSEEN.items()}
HELD_OUT: dict[str, Callable[[bool], ZooStep]] = {
    name: partial(_of_rows, step) for name, step in UNMEASURED.items()
}


def all_cases() -> Iterator[Case]:
    """Alternately from all groups, the most common models first."""
    groups = (DEVELOPMENT, FORMERLY_HELD_OUT, STUDIED, HELD_OUT)
    for name, make in filter(None, chain(*zip_longest(*(group.items() for group in groups)))):
        yield Case(name, name in HELD_OUT, make)


# Steps with loops, whose programs autopar writes anew: their predicted times are of what it runs.
LOOPS = (
    *("micro-batches in a scan", "stacked layers", "translator", "corrected actors", "transport"),
    *("recurrent speech", "world model", "chunked state space", "actor and critics"),
    *("solver in the loop", "set detector", "neural ode", "rwkv", "sliding window", "transducer"),
    *("lstm", "mamba", "scanned llama", "linear attention", "branches", "ppo"),
)


def planned_cases() -> Iterator[Case]:
    """The steps of `LOOPS` as autopar plans and rewrites them, the held-out ones first."""
    cases = {case.name: case for case in all_cases()}
    for name in LOOPS:
        yield Case(planned_name(name), name in HELD_OUT, cases[name].make, planned=True)


def planned_name(name: str) -> str:
    return f"{name}, as planned"


def held_out_cases() -> Iterator[Case]:
    return (case for case in all_cases() if case.held_out)


def example_cases() -> Iterator[Case]:
    """With the batches that examples/README.md names for one H200."""
    from examples import finetune_llama, train_moe, train_vit

    examples: dict[str, Callable[[str | None], Example]] = {
        "finetune_llama.py": lambda tiny: finetune_llama.make_example(tiny or "8b", 2, 2),
        "train_vit.py": lambda tiny: train_vit.make_example(tiny or "large", 256),
        "train_moe.py": lambda tiny: train_moe.make_example(tiny or "1.3b", 32),
    }
    for name, make in examples.items():
        yield Case(name, False, partial(_at_size, make), planned=True)


def _at_size(make: Callable[[str | None], Example], tiny: bool) -> ZooStep:
    return _step_of(make("tiny" if tiny else None))
