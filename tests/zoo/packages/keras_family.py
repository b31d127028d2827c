"""Keras 3 with the JAX backend: `stateless_call` and `stateless_apply` in a functional step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import images, tokens

# Keras reads it on its first import, which may be that of another package.
os.environ.setdefault("KERAS_BACKEND", "jax")


def _keras() -> Any:
    import keras

    if keras.backend.backend() != "jax":
        raise RuntimeError("Keras runs on another backend: set KERAS_BACKEND=jax")
    return keras


def _stateless(make_model: Callable[[Any], Any], size: Size, make_batch: Any) -> ZooStep:
    """Keras's guide to custom loops. A model makes its variables eagerly, so at REAL size it is
    built under `StatelessScope`, and only shapes of its variables are taken."""
    keras = _keras()
    model = make_model(keras)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    shapes = [[(tuple(v.shape), v.dtype) for v in group] for group in variables]

    def make_state() -> Any:
        if size.is_small:
            return tuple([jnp.array(v.value) for v in group] for group in variables)
        return tuple([jnp.zeros(shape, dtype) for shape, dtype in group] for group in shapes)

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(state: Any, batch: Any) -> Any:
        trainable, rest, opt_state = state

        def loss_fn(trainable: Any) -> Any:
            logits, new = model.stateless_call(trainable, rest, batch["input"], training=True)
            return loss_of(batch["label"], logits), new

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        trainable, opt_state = optimizer.stateless_apply(opt_state, grads, trainable)
        return (trainable, rest, opt_state), loss

    return ZooStep(step, make_state, make_batch)


def _labelled_images(rows: int, side: int, classes: int) -> Any:
    made = images(rows, side, classes)

    def make_batch(i: int) -> tuple[Any, ...]:
        (batch,) = made(i)
        return ({"input": batch["image"], "label": batch["label"]},)

    return make_batch


@zoo_program(
    "keras-cnn", source="keras", layers=True, packages=("keras",), micro_batches=1,
    rtol=1e-2, atol=2e-3,
)  # fmt: skip
def keras_cnn(size: Size) -> ZooStep:
    """A sequential network with BatchNorm; seeds of dropout are variables of the model."""
    channels, side, rows = (4, 8, 8) if size.is_small else (256, 128, 2048)

    def make_model(keras: Any) -> Any:
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((side, side, 3)),
                layers.Conv2D(channels, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.MaxPooling2D(2),
                layers.SeparableConv2D(2 * channels, 3, activation="relu", padding="same"),
                layers.GlobalAveragePooling2D(),
                layers.Dropout(0.2, seed=1),
                layers.Dense(10),
            ]
        )

    return _stateless(make_model, size, _labelled_images(rows, side, 10))


@zoo_program(
    "keras-application", source="keras", layers=True, packages=("keras",), micro_batches=1,
    rtol=5e-2, atol=1e-2,
)  # fmt: skip
def keras_application(size: Size) -> ZooStep:
    """`keras.applications`: MobileNetV3 when small, ResNet50V2 at real size."""
    if size.is_small:
        make = lambda keras: keras.applications.MobileNetV3Small(  # noqa: E731
            (32, 32, 3), alpha=0.35, minimalistic=True, weights=None, classes=4,
            classifier_activation=None, dropout_rate=0.0, include_preprocessing=False,
        )  # fmt: skip
        return _stateless(make, size, _labelled_images(32, 32, 4))
    make = lambda keras: keras.applications.ResNet50V2(  # noqa: E731
        weights=None, classes=1000, classifier_activation=None
    )
    return _stateless(make, size, _labelled_images(2048, 224, 1000))


@zoo_program("keras-transformer", source="keras", layers=True, packages=("keras",))
def keras_transformer(size: Size) -> ZooStep:
    """A text classifier of the functional API, as in Keras's examples."""
    width, heads, depth, length, vocabulary, rows = (16, 2, 2, 8, 32, 8)
    if not size.is_small:
        width, heads, depth, length, vocabulary, rows = (1024, 16, 12, 512, 30000, 256)

    def make_model(keras: Any) -> Any:
        layers = keras.layers
        given = keras.Input((length,), dtype="int32")
        x = layers.Embedding(vocabulary, width)(given)
        for _ in range(depth):
            y = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(y, y)])
            y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(width)(y)])
        return keras.Model(given, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))

    made = tokens(rows, length, vocabulary)

    def make_batch(i: int) -> tuple[Any, ...]:
        (batch,) = made(i)
        return ({"input": batch, "label": (jnp.arange(rows) + i) % 4},)

    return _stateless(make_model, size, make_batch)


@zoo_program("keras-bidirectional", source="keras", packages=("keras",))
def keras_bidirectional(size: Size) -> ZooStep:
    """Two directions of an LSTM over the same sequence."""
    width, length, rows = (8, 6, 8) if size.is_small else (1024, 256, 1024)

    def make_model(keras: Any) -> Any:
        layers = keras.layers
        lstm = layers.Bidirectional(layers.LSTM(width))
        return keras.Sequential([keras.Input((length, width)), lstm, layers.Dense(4)])

    def make_batch(i: int) -> tuple[Any, ...]:
        x = jax.random.normal(jax.random.key(i), (rows, length, width))
        return ({"input": x, "label": (jnp.arange(rows) + i) % 4},)

    return _stateless(make_model, size, make_batch)


@zoo_program("kerashub-gpt2", source="keras-hub", layers=True, packages=("keras", "keras_hub"))
def kerashub_gpt2(size: Size) -> ZooStep:
    """KerasHub's GPT-2 (medium at real size) with a head that classifies."""
    depth, heads, width, vocabulary, length, rows = (2, 2, 16, 32, 8, 8)
    if not size.is_small:
        depth, heads, width, vocabulary, length, rows = (24, 16, 1024, 50257, 1024, 128)

    def make_model(keras: Any) -> Any:
        import keras_hub

        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=vocabulary,
            num_layers=depth,
            num_heads=heads,
            hidden_dim=width,
            intermediate_dim=4 * width,
            dropout=0.0,
            max_sequence_length=length,
        )
        return keras.Model(backbone.inputs, keras.layers.Dense(4)(backbone.output[:, -1]))

    made = tokens(rows, length, vocabulary)

    def make_batch(i: int) -> tuple[Any, ...]:
        (batch,) = made(i)
        given = {"token_ids": batch, "padding_mask": jnp.ones_like(batch)}
        return ({"input": given, "label": (jnp.arange(rows) + i) % 4},)

    return _stateless(make_model, size, make_batch)
