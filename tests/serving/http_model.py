"""A tiny served model for the tests of the HTTP server: byte-level tokens, random weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import autopar
from examples.llm_serving.config import config_from_dict
from examples.llm_serving.engine import BatchingEngine
from examples.llm_serving.model import random_model
from examples.llm_serving.running import serving
from examples.llm_serving.server import Limits, Server
from examples.llm_serving.tokens import Tokenizer

VOCAB_SIZE = 288


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level: characters of several bytes are several tokens, some cut within."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the answer is größer than 日本 and 42 € " * 4], trainer)
    return backend


CONFIG = {
    "model_type": "gpt2",
    "vocab_size": VOCAB_SIZE,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 4096,
}


def make_engine(*, slots: int, max_queue: int, max_length: int) -> BatchingEngine:
    """A GPT-2 of one layer on one device: how it is sharded is tested elsewhere."""
    method = autopar.ShardParallel(mesh_shape=(1,))
    model = random_model(
        config_from_dict(CONFIG),
        method=method,
        num_slots=slots,
        max_length=max_length,
        queue_size=max_queue,
    )
    return model.engine


@contextlib.contextmanager
def served(engine: Any, **options: Any) -> Iterator[tuple[str, Server]]:
    """A URL and its server."""
    limits = {"drain_s": 2.0, **options.pop("limits", {})}
    tokenizer = Tokenizer(make_tokenizer()) if options.pop("with_text", True) else None
    server = Server(engine, tokenizer, limits=Limits(**limits), **options)
    with serving(server) as url:
        yield url, server
