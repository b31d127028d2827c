"""Hugging Face transformers: the Flax models of its last release 4, with made-up weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import images, label_loss, next_token_loss, tokens, train_step

NEEDS = {"source": "transformers", "packages": ("transformers", "flax"), "layers": True}


def _trained(
    model: Any, input_shape: Any, loss_fn: Callable[..., jax.Array], make_batch: Any
) -> ZooStep:
    """The package's example scripts: `model(..., params=params, dropout_rng=key, train=True)`."""

    def make_params() -> Any:
        return model.init_weights(jax.random.key(0), input_shape)

    return train_step(loss_fn, make_params, make_batch)


@zoo_program("transformers-gpt2", **NEEDS)
def transformers_gpt2(size: Size) -> ZooStep:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    length, rows = (8, 8) if size.is_small else (1024, 64)
    config = GPT2Config(n_embd=1600, n_layer=48, n_head=25)  # GPT-2 XL
    if size.is_small:
        config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = FlaxGPT2LMHeadModel(config, input_shape=(1, length), _do_init=False)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        key = jax.random.key(1)
        logits = model(batch, params=params, dropout_rng=key, train=True).logits
        return next_token_loss(logits, batch)

    return _trained(model, (1, length), loss, tokens(rows, length, config.vocab_size))


@zoo_program("transformers-bert", **NEEDS)
def transformers_bert(size: Size) -> ZooStep:
    """Masked words: the loss is a weighted mean over the masked places."""
    from transformers import BertConfig, FlaxBertForMaskedLM

    length, rows = (8, 8) if size.is_small else (512, 256)
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )  # BERT-large
    if size.is_small:
        config = BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16,
        )  # fmt: skip
    model = FlaxBertForMaskedLM(config, input_shape=(1, length), _do_init=False)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model(
            batch["tokens"], batch["seen"], params=params, dropout_rng=jax.random.key(1), train=True
        ).logits
        words = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(words, batch["labels"][..., None], -1)[..., 0]
        return -jnp.sum(picked * batch["masked"]) / jnp.sum(batch["masked"])

    made = tokens(rows, length, config.vocab_size)

    def make_batch(i: int) -> tuple[Any, ...]:
        (labels,) = made(i)
        masked = jax.random.uniform(jax.random.key(i), labels.shape) < 0.25
        return (
            {"tokens": jnp.where(masked, 1, labels), "labels": labels, "masked": masked * 1.0,
             "seen": jnp.ones_like(labels)},
        )  # fmt: skip

    return _trained(model, (1, length), loss, make_batch)


@zoo_program("transformers-bart", **NEEDS)
def transformers_bart(size: Size) -> ZooStep:
    """Encoder and decoder, with an embedding that both and the logits share."""
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    length, rows = (8, 8) if size.is_small else (1024, 64)
    config = BartConfig()  # BART-large
    if size.is_small:
        config = BartConfig(
            vocab_size=32, max_position_embeddings=16, d_model=16, encoder_layers=1,
            decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32,
        )  # fmt: skip
    model = FlaxBartForConditionalGeneration(config, input_shape=(1, length), _do_init=False)
    made = tokens(rows, length, config.vocab_size)

    def loss(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        seen = jnp.ones_like(source)
        logits = model(source, seen, shifted, params=params, train=False).logits
        return label_loss(logits, target)

    def make_batch(i: int) -> tuple[Any, ...]:
        return made(2 * i)[0], made(2 * i + 1)[0]

    return _trained(model, (1, length), loss, make_batch)


@zoo_program("transformers-vit", **NEEDS)
def transformers_vit(size: Size) -> ZooStep:
    """197 tokens at real size, which no mesh divides."""
    from transformers import FlaxViTForImageClassification, ViTConfig

    side, rows = (8, 8) if size.is_small else (224, 512)
    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        num_labels=1000,
    )  # fmt: skip
    if size.is_small:
        config = ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            image_size=8, patch_size=4, num_labels=4,
        )  # fmt: skip
    shape = (1, side, side, 3)
    model = FlaxViTForImageClassification(config, input_shape=shape, _do_init=False)

    def loss(params: Any, batch: Any) -> jax.Array:
        pixels = batch["image"].transpose(0, 3, 1, 2)
        logits = model(pixels, params=params, dropout_rng=jax.random.key(1), train=True).logits
        return label_loss(logits, batch["label"])

    return _trained(model, shape, loss, images(rows, side, config.num_labels))


@zoo_program("transformers-llama", **NEEDS)
def transformers_llama(size: Size) -> ZooStep:
    """Rotary positions and a gated MLP; Llama 2 7B at real size."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    length, rows = (8, 8) if size.is_small else (2048, 16)
    config = LlamaConfig()
    if size.is_small:
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=16,
        )  # fmt: skip
    model = FlaxLlamaForCausalLM(config, input_shape=(1, length), _do_init=False)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        logits = model(batch, params=params, dropout_rng=jax.random.key(1), train=True).logits
        return next_token_loss(logits, batch)

    return _trained(model, (1, length), loss, tokens(rows, length, config.vocab_size))
