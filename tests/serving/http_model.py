"""A tiny served model for the tests of the HTTP server: byte-level tokens, random weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from examples.llm_serving.running import serving
from examples.llm_serving.server import Limits, Server
from examples.llm_serving.tokens import Tokenizer
from tests.serving.bigram_engine import BigramEngine

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


def make_engine(**options: Any) -> Any:
    return BigramEngine(VOCAB_SIZE, **options)


@contextlib.contextmanager
def served(engine: Any, **options: Any) -> Iterator[tuple[str, Server]]:
    """A URL and its server."""
    limits = {"drain_s": 2.0, **options.pop("limits", {})}
    tokenizer = Tokenizer(make_tokenizer()) if options.pop("with_text", True) else None
    server = Server(engine, tokenizer, limits=Limits(**limits), **options)
    with serving(server) as url:
        yield url, server
