"""The steps that are measured on one GPU and predicted for it: models as data.

A `Case` is a model of `examples.models` with some of its config changed. `example_of` makes the
model, `method_of` the method that plans it, `plain_step` what a user without autopar would hand to
`jax.jit`: the same step, with a hand-written `lax.scan` that accumulates gradients if the case has
micro-batches. Where a model's width matters, it has fewer layers than the original, since compiling
is most of the benchmark's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import autopar
from examples.models import Batch, Example, build
from examples.models.transformer import cross_entropy

LossFn = Callable[[Any, Any, Batch], jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """`config` has fields of the model's config. `remat`: "" keeps all residuals, "model"
    recomputes each layer by the model's `jax.checkpoint`, "autopar" by our pass (the plain step
    then uses `jax.checkpoint`)."""

    model: str
    batch: int
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    remat: str = ""
    micro_batches: int = 1

    def label(self) -> str:
        layers = self.config.get("num_layers")
        parts = [self.model + (f" {layers} layers" if layers else ""), f"batch {self.batch}"]
        parts += [f"remat {self.remat}"] if self.remat else []
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        parts += [self.config["attention"]] if "attention" in self.config else []
        return ", ".join(parts)


_GPT = {"num_heads": 16, "attention": "cudnn"}  # heads of 128
_GPT_6 = {**_GPT, "num_layers": 6}
_LLAMA = {"num_layers": 4, "seq_len": 2048, "attention": "cudnn"}
_MOE = {"attention": "cudnn"}
_BERT = {"num_layers": 8, "dropout": 0.0, "attention": "cudnn"}

# Memory grows within a group, since the allocator only reports its peak so far.
GROUPS: dict[str, list[Case]] = {
    "gpt": [Case("gpt-1.3b", 16, _GPT), Case("gpt-1.3b", 32, _GPT)],
    "llama": [
        Case("llama2-7b", 4, _LLAMA),
        Case("llama2-7b", 8, _LLAMA, remat="model"),
        Case("llama2-7b", 8, _LLAMA, micro_batches=2),
        Case("llama2-7b", 8, _LLAMA),
    ],
    "gpt-6": [
        Case("gpt-1.3b", 8, {**_GPT_6, "attention": "einsum"}),
        Case("gpt-1.3b", 32, _GPT_6, remat="model"),
        Case("gpt-1.3b", 32, _GPT_6, remat="autopar"),
        Case("gpt-1.3b", 32, _GPT_6, micro_batches=4),
        Case("gpt-1.3b", 32, _GPT_6),
    ],
    "moe": [Case("moe-380m", 16, _MOE), Case("moe-380m", 32, _MOE)],
    "wresnet": [Case("wresnet-250m", 64)],
    "bert": [Case("bert-large", 32, _BERT), Case("bert-large", 128, _BERT)],
    "more": [Case("moe-690m", 16, _MOE), Case("wresnet-250m", 32)],
}
TINY_GROUPS: dict[str, list[Case]] = {
    "gpt": [Case("gpt-tiny", 8), Case("gpt-tiny", 8, {"attention": "xla"}, remat="autopar")],
    "llama": [Case("llama-tiny", 8, micro_batches=2), Case("llama-tiny", 8, remat="model")],
}


def allow_fused_attention() -> None:
    """Lets JAX trace fused attention, for planning, where it cannot ask cuDNN for its version."""
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda *_: 91000


def example_of(case: Case, *, remat: bool | None = None) -> Example:
    """`remat` overrides whether the model itself recomputes layers."""
    by_model = case.remat == "model" if remat is None else remat
    overrides = {**case.config, "remat": True} if by_model else dict(case.config)
    if "dtype" in overrides:  # by name, as in JSON
        overrides["dtype"] = jnp.dtype(overrides["dtype"])
    return build(case.model, batch_size=case.batch, **overrides)


def method_of(case: Case) -> Any:
    if case.micro_batches == 1 and case.remat != "autopar":
        return None  # the default method
    remat = "all" if case.remat == "autopar" else "auto"
    options = autopar.ShardingOptions(remat=remat)
    return autopar.ShardParallel((1,), num_micro_batches=case.micro_batches, options=options)


def plain_step(case: Case) -> Callable[[Any, Batch], tuple[Any, jax.Array]]:
    example = example_of(case, remat=case.remat != "")
    if case.micro_batches == 1:
        return example.train_step
    if case.model.startswith("llama"):
        return _accumulated_llama(example, case.micro_batches)
    if case.model.startswith("gpt"):
        return _accumulated_gpt(case.micro_batches)
    raise ValueError(f"{case.model}: there is no hand-written accumulation for this model")


def _accumulated_gpt(num: int) -> Callable[[Any, Batch], tuple[Any, jax.Array]]:
    def loss_fn(params: Any, state: Any, batch: Batch) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["tokens"])
        return jnp.mean(cross_entropy(logits, batch["targets"]))

    def train_step(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        loss, grads = _mean_gradients(loss_fn, state, batch, num)
        return state.apply_gradients(grads=grads), loss

    return train_step


def _accumulated_llama(example: Example, num: int) -> Callable[[Any, Batch], tuple[Any, jax.Array]]:
    optimizer = optax.adam(example.config.learning_rate)

    def loss_fn(params: Any, state: Any, batch: Batch) -> jax.Array:
        logits = nnx.merge(state.graphdef, params)(batch["tokens"])
        return jnp.mean(cross_entropy(logits, batch["targets"]))

    def train_step(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        loss, grads = _mean_gradients(loss_fn, state, batch, num)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), loss

    return train_step


def _mean_gradients(loss_fn: LossFn, state: Any, batch: Batch, num: int) -> tuple[jax.Array, Any]:
    """Mean loss and gradients over `num` equal parts of the batch, one after another."""
    parts = {name: x.reshape(num, -1, *x.shape[1:]) for name, x in batch.items()}

    def add(carry: Any, part: Batch) -> tuple[Any, None]:
        found = jax.value_and_grad(loss_fn)(state.params, state, part)
        return jax.tree.map(jnp.add, carry, found), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
    sums, _ = jax.lax.scan(add, zeros, parts)
    return jax.tree.map(lambda x: x / num, sums)
