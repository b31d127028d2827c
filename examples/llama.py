"""A Llama in Flax nnx, trained on all devices by a step written for one.

    python examples/llama.py
    python examples/llama.py --size 3-8b --batch 64 --cluster ray --address auto
    autopar plan examples/llama.py:make_step --cluster 50x4:v100-32gb --set size=13b

The first command runs here, on virtual CPU devices if there is no GPU; the second on a Ray cluster;
the third plans for a cluster that need not exist. The step changes the model and the optimizer in
place, as under `nnx.jit`. The model is in examples/models/llama.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data
from examples.models import Example, llama
from examples.models.transformer import cross_entropy

SIZES = {
    "tiny": dataclasses.replace(llama.EXAMPLES["llama-tiny"].config, learning_rate=1e-2),
    "7b": llama.EXAMPLES["llama2-7b"].config,
    "13b": llama.EXAMPLES["llama2-13b"].config,
    "70b": llama.LlamaConfig(8192, 80, 64, 8, 28672, dtype=jnp.bfloat16),
    "3-8b": llama.EXAMPLES["llama3-8b"].config,
}


def make_example(
    size: str = "13b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> Example:
    config = common.sized(SIZES, size, seq_len=seq, num_layers=layers)
    return llama.example(config, batch, f"llama-{size}")


def make_step(
    size: str = "13b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """For `autopar plan` and `autopar sweep`. `size`: one of `SIZES`; `batch`: sequences per step;
    `seq`: tokens per sequence; `layers`: number of layers."""
    example = make_example(size, batch, seq, layers)
    return example.train_step, (example.abstract_state(), example.abstract_batch())


@autopar.parallelize
def train_step(model: llama.Llama, optimizer: nnx.Optimizer, batch: data.Batch) -> jax.Array:
    def loss_of(model: llama.Llama) -> jax.Array:
        return jnp.mean(cross_entropy(model(batch["tokens"]), batch["targets"]))

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    parser = common.arguments(__doc__, sizes=SIZES, size="tiny", steps=60, batch=16)
    arguments = parser.parse_args()
    example = make_example(arguments.size, arguments.batch)
    config, shapes = example.config, example.abstract_batch()

    def create(key: jax.Array) -> tuple[llama.Llama, nnx.Optimizer]:
        model = llama.Llama(config, nnx.Rngs(key))
        return model, nnx.Optimizer(model, optax.adam(config.learning_rate), wrt=nnx.Param)

    with common.devices(arguments):
        # Created in the step's shards, never whole on one device.
        method = autopar.CreateStateParallel(train_step, shapes)
        model, optimizer = autopar.parallelize(create, method=method)(jax.random.key(0))
        common.show(train_step.plan(model, optimizer, shapes))

        tokens_per_step = arguments.batch * config.seq_len
        progress = common.Progress(arguments.steps, "tokens", tokens_per_step)
        source = data.token_chains(config.vocab_size, config.seq_len, arguments.batch)
        source = itertools.islice(source, arguments.steps)
        with autopar.data_loader(source, train_step) as batches:
            for batch in batches:
                progress(train_step(model, optimizer, batch))


if __name__ == "__main__":
    main()
