"""Made-up data with a rule that a model can learn, as endless batches of numpy arrays.

The rules are fixed: the same for every batch, process and run. `seed` chooses the draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Batch = dict[str, np.ndarray]

NUM_SUCCESSORS = 4  # so the best loss of a language model is log 4 = 1.39


def token_chains(
    vocab_size: int, seq_len: int, batch_size: int, *, first: int = 0, seed: int = 0
) -> Iterator[Batch]:
    """Sequences in which a table allows four successors of each token; `targets` are the next
    tokens. Batch n is the same whichever batch is the `first`."""
    table = np.random.default_rng(0).integers(vocab_size, size=(vocab_size, NUM_SUCCESSORS))
    while True:
        random = np.random.default_rng((seed, first))
        tokens = np.empty((batch_size, seq_len + 1), np.int32)
        tokens[:, 0] = random.integers(vocab_size, size=batch_size)
        turns = random.integers(NUM_SUCCESSORS, size=(seq_len, batch_size))
        for position, turn in enumerate(turns):
            tokens[:, position + 1] = table[tokens[:, position], turn]
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        first += 1


def masked_topics(
    vocab_size: int, seq_len: int, batch_size: int, masked_fraction: float, *, seed: int = 0
) -> Iterator[Batch]:
    """Sequences about one of eight topics, each with a few tokens of its own. Some tokens are
    replaced by the last token; a model can infer candidates for them from the others."""
    num_topics, mask_token = 8, vocab_size - 1
    topics = np.random.default_rng(0).permutation(mask_token)[
        : mask_token // num_topics * num_topics
    ]
    topics = topics.reshape(num_topics, -1)
    random = np.random.default_rng(seed)
    while True:
        topic = random.integers(num_topics, size=(batch_size, 1))
        words = random.integers(topics.shape[1], size=(batch_size, seq_len))
        targets = topics[topic, words].astype(np.int32)
        is_masked = random.random(targets.shape) < masked_fraction
        yield {
            "tokens": np.where(is_masked, mask_token, targets).astype(np.int32),
            "targets": targets,
            "is_masked": is_masked.astype(np.float32),
        }


def text_windows(
    path: Path, seq_len: int, batch_size: int, *, first: int = 0, seed: int = 0
) -> Iterator[Batch]:
    """Windows of a file's bytes, one token each; `targets` are the next bytes. Batch n is the same
    whichever batch is the `first`."""
    text = np.fromfile(path, np.uint8)
    if len(text) <= seq_len:
        raise ValueError(f"{path} has {len(text)} bytes; a window needs {seq_len + 1}")

    def window(number: int) -> Batch:
        random = np.random.default_rng((seed, number))
        starts = random.integers(len(text) - seq_len, size=batch_size)
        windows = text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    return map(window, itertools.count(first))


def patterned_images(
    image_size: int, num_classes: int, batch_size: int, *, first: int = 0, seed: int = 0
) -> Iterator[Batch]:
    """Images of noise with a faint pattern of their class. Batch n is the same whichever batch is
    the `first`. The noise is cut from one long strip: drawing it takes longer than a GPU's step."""
    shape = (image_size, image_size, 3)
    size = math.prod(shape)
    patterns = np.random.default_rng(0).standard_normal((num_classes, *shape), np.float32)
    strip = np.random.default_rng(1).standard_normal(max(2**22, 4 * size), np.float32)
    while True:
        random = np.random.default_rng((seed, first))
        labels = random.integers(num_classes, size=batch_size).astype(np.int32)
        images = patterns[labels]
        for image, start in zip(
            images, random.integers(len(strip) - size, size=batch_size), strict=True
        ):
            image += strip[start : start + size].reshape(shape)
        yield {"images": images, "labels": labels}
        first += 1
