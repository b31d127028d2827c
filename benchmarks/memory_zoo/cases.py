"""The models and plans of the benchmark: names → `Case`s.

Models have the width of real ones but few layers, so that XLA compiles each in less than a minute.
Those of `DEVELOPMENT` are the ones whose buffers were studied while the memory model was made;
those of `HELD_OUT` decided nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from benchmarks.memory_zoo import latecomers, newcomers
from benchmarks.planning_zoo import strangers
from examples.models import build, dlrm, gpt, moe
from examples.models.example import Example
from tests.zoo.program import Size, ZooStep, all_programs
from tests.zoo.written.diffusion import UNet
from tests.zoo.written.training import normal, trained_with_key
from tests.zoo.written.vision import ConvNeXt, Mixer, ViT, classifier

NO_BUDGET_BYTES = 1e15
NUM_MICRO_BATCHES = 4
NUM_STAGES = 2

Step = tuple[Callable[..., Any], tuple[Any, ...]]
bf16 = jnp.bfloat16


@dataclass(frozen=True)
class Case:
    """A model and a kind of plan; `held_out` models decided nothing in the memory model."""

    model: str
    kind: str
    held_out: bool

    @property
    def name(self) -> str:
        return f"{self.model}/{self.kind}"

    @property
    def num_devices(self) -> int:
        return 1 if self.kind.startswith("one") else 8

    def step(self) -> Step:
        """The train step, and its arguments as shapes: a batch of eight devices, or of one."""
        return (HELD_OUT if self.held_out else DEVELOPMENT)[self.model](self.num_devices)

    def method(self) -> Any:
        return KINDS[self.kind]()


def free_method(num_micro_batches: int = 1, remat: str = "none") -> Any:
    options = autopar.ShardingOptions(memory_budget_bytes=NO_BUDGET_BYTES, remat=remat)
    return autopar.ShardParallel(num_micro_batches=num_micro_batches, options=options)


def _stages(num_layers: int = NUM_STAGES, remat: str = "none") -> Any:
    options = autopar.ShardingOptions(memory_budget_bytes=NO_BUDGET_BYTES, remat=remat)
    return autopar.PipeshardParallel(
        NUM_MICRO_BATCHES,
        layers=autopar.AutoLayers(num_layers),
        stages=autopar.UniformStages(NUM_STAGES),
        options=options,
    )


KINDS: dict[str, Callable[[], Any]] = {
    "mesh": free_method,
    "zero-3": autopar.Zero3Parallel,
    "recompute": partial(free_method, remat="all"),
    "micro-batches": partial(free_method, NUM_MICRO_BATCHES),
    "stages": _stages,
    "recomputed stages": partial(_stages, 2 * NUM_STAGES, "all"),
    "one": free_method,
    "one-recompute": partial(free_method, remat="all"),
}


def _example(make: Callable[[int], Example], num_devices: int) -> Step:
    example = make(num_devices)
    return example.train_step, (example.abstract_state(), example.abstract_batch())


def _zoo(make: Callable[[int], ZooStep], num_devices: int) -> Step:
    step = make(num_devices)
    batch = jax.eval_shape(lambda: step.make_batch(0))
    return step.step, (jax.eval_shape(step.make_state), *batch)


def _real(name: str, num_devices: int) -> Step:
    return _zoo(lambda _: all_programs()[name].build(Size.REAL), num_devices)


def _classifier(model: Any, rows: int, num_devices: int) -> Step:
    shape = (rows * num_devices, 224, 224, 3)
    return _zoo(lambda _: classifier(Size.REAL, model, 1000, *shape), num_devices)


def _unet(num_devices: int) -> Step:
    model: Any = UNet(192, (1, 2), 1, 8, 32, bf16)
    shape = (32 * num_devices, 64, 64, 4)

    def init() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, *shape[1:])), jnp.zeros(1))

    def loss(params: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, images.shape)
        noisy = 0.8 * images + 0.6 * noise
        return jnp.mean((model.apply(params, noisy, noise[:, 0, 0, 0]) - noise) ** 2)

    return _zoo(lambda _: trained_with_key(init, loss, lambda i: (normal(i, *shape),)), num_devices)


_GPT = gpt.GPTConfig(2560, 2, 32, dtype=bf16)
# Four layers to a stage, which run as one loop there.
_SCANNED_GPT = gpt.GPTConfig(1024, 8, 16, seq_len=1024, dtype=bf16, scan_layers=True)
_DLRM = dlrm.DLRMConfig(16, 131072, 64, (512, 256), (1024, 1024, 512))

DEVELOPMENT: dict[str, Callable[[int], Step]] = {
    "gpt": partial(_example, lambda n: gpt.example(_GPT, 8 * n)),
    "llama": partial(_example, lambda n: build("llama3-8b", 2 * n, num_layers=2, seq_len=2048)),
    "t5": partial(_zoo, lambda n: strangers.t5(2, 1024, 16, 2816, 32 * n)),
    "scanned llama": partial(
        _zoo, lambda n: strangers.scanned_llama(4, 2048, 16, 5504, 2 * n, length=2048)
    ),
    "lstm": partial(_real, "lstm"),
    "unet": _unet,
    "dlrm": partial(_example, lambda n: dlrm.example(_DLRM, 8192 * n)),
    "vae": partial(_real, "vae"),
    "moe": partial(
        _example,
        lambda n: moe.example(moe.MoEConfig(1536, 2, 16, num_heads=16, dtype=bf16), 4 * n),
    ),
    "mixer": partial(_classifier, Mixer(1000, 16, 1024, 2, 512, bf16), 128),
    "scanned gpt": partial(_example, lambda n: gpt.example(_SCANNED_GPT, 4 * n)),
    "bert": partial(_example, lambda n: build("bert-large", 16 * n, num_layers=2)),
    "vit": partial(_classifier, ViT(1000, 16, 1024, 2, 16, bf16), 128),
    "wide resnet": partial(
        _example,
        lambda n: build("wresnet-250m", 8 * n, stage_sizes=(1, 1, 1, 1), dtype=bf16),
    ),
    "convnext": partial(_classifier, ConvNeXt(1000, (1, 1), (192, 384), bf16), 64),
    "perceiver": partial(_zoo, lambda n: newcomers.perceiver(4 * n)),
    "transducer": partial(_zoo, lambda n: newcomers.transducer(16 * n)),
    "hyena": partial(_zoo, lambda n: newcomers.hyena(8 * n)),
    "sorted experts": partial(_zoo, lambda n: latecomers.sorted_experts(8 * n)),
    "mamba hybrid": partial(_zoo, lambda n: latecomers.mamba_hybrid(2 * n)),
}

HELD_OUT: dict[str, Callable[[int], Step]] = {
    "linen gpt": partial(_zoo, lambda n: strangers.linen_gpt(2, 2048, 16, 8 * n)),
    "gnn": partial(_real, "gnn"),
    "scanned bert": partial(
        _example, lambda n: build("bert-large", 8 * n, num_layers=8, scan_layers=True)
    ),
    "pixel cnn": partial(_zoo, lambda n: newcomers.pixel_cnn(32 * n)),
    "swin": partial(_zoo, lambda n: newcomers.swin(32 * n)),
    "linear attention": partial(_zoo, lambda n: newcomers.linear_attention(8 * n)),
    "conformer": partial(_zoo, lambda n: newcomers.conformer(16 * n)),
    "diffusion transformer": partial(_zoo, lambda n: newcomers.diffusion_transformer(16 * n)),
    "graph transformer": partial(_zoo, lambda n: latecomers.graph_transformer(16 * n)),
    "image codec": partial(_zoo, lambda n: latecomers.image_codec(8 * n)),
    "style network": partial(_zoo, lambda n: latecomers.style_network(16 * n)),
    "perceiver io": partial(_zoo, lambda n: latecomers.perceiver_io(16 * n)),
}


# Models with an option for `jax.checkpoint` around their layers, with it.
CHECKPOINTED: dict[str, Callable[[int], Step]] = {
    "llama": partial(
        _example, lambda n: build("llama3-8b", 2 * n, num_layers=2, seq_len=2048, remat=True)
    ),
}


# Written when the memory model was finished; they have fewer kinds of plans.
LATECOMERS = (
    "mamba hybrid",
    "graph transformer",
    "image codec",
    "style network",
    "perceiver io",
    "sorted experts",
)
SCANNED = ("scanned gpt", "scanned bert")  # of interest in stages alone
WITH_STAGES = ("gpt", "t5", "vit", "bert")
WITH_RECOMPUTED_STAGES = ("gpt", "bert", *SCANNED)


def models() -> tuple[str, ...]:
    return (*DEVELOPMENT, *HELD_OUT)


BUDGET_SHARES = (0.6, 0.7, 0.8, 0.9)
WITH_BUDGETS = ("gpt", "llama", "t5", "scanned llama", "unet", "bert", "vit", "mixer")


def budget_cases() -> Iterator[tuple[Case, float]]:
    """Plans to a budget, as a share of the peak that the same kind of plan has without one: on one
    device and on eight, where recomputation, micro-batches and pipelines are searched, and in
    pipelines of two stages."""
    for share in BUDGET_SHARES:
        for number, model in enumerate(WITH_BUDGETS):
            kind = "mesh" if number % 2 == int(10 * share) % 2 else "one"
            yield case_of(model, kind), share
    yield from ((case_of(model, "stages"), 0.8) for model in WITH_STAGES)
    yield from ((case_of(model, "mesh"), 0.7) for model in LATECOMERS)


def case_of(model: str, kind: str) -> Case:
    return Case(model, kind, model in HELD_OUT)


def all_cases() -> Iterator[Case]:
    """All plans, by kind. A pipeline compiles eight programs, so few models have one."""
    for kind in ("mesh", "one", "recompute", "micro-batches"):
        but = SCANNED if kind in ("mesh", "one") else (*SCANNED, *LATECOMERS)
        yield from (case_of(model, kind) for model in models() if model not in but)
    yield from (case_of(model, "stages") for model in (*WITH_STAGES, *SCANNED))
    yield from (case_of(model, "recomputed stages") for model in WITH_RECOMPUTED_STAGES)
