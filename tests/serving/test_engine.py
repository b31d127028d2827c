"""Continuous batching gives every request what it would get alone, and lets nothing hang."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from examples.llm_serving import decoder
from examples.llm_serving.config import config_from_dict
from examples.llm_serving.engine import BatchingEngine, all_padded_lengths
from examples.llm_serving.model import LanguageModel, random_model
from examples.llm_serving.requests import (
    EngineStoppedError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    ServingError,
)
from examples.llm_serving.steps import Steps
from examples.llm_serving.weights import random_params

LENGTH = 48
CONFIG = config_from_dict(
    {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
        "max_position_embeddings": LENGTH,
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def parts() -> tuple[Steps, Any]:
    """The programs on one device and parameters, for several engines."""
    method = autopar.ShardParallel((1,))
    steps = Steps(CONFIG, num_slots=3, length=LENGTH, dtype=np.float32, method=method)
    return steps, random_params(CONFIG, np.float32, steps.param_shardings(), seed=3)


@pytest.fixture
def engine(parts: tuple[Steps, Any]) -> Iterator[BatchingEngine]:
    with BatchingEngine(*parts, queue_size=6, steps_per_call=3, attended_lengths=(32,)) as own:
        yield own


@pytest.fixture(scope="module")
def alone(parts: tuple[Steps, Any]) -> Any:
    """Greedy answers without cache, slots or batches: the whole sequence again for every token."""
    _, params = parts
    empty = decoder.make_cache(CONFIG, 1, LENGTH, np.float32)
    forward = jax.jit(
        lambda tokens, length: decoder.prefill(CONFIG, params, empty, tokens, length, 0)[1]
    )

    def answer(prompt: tuple[int, ...], number: int) -> tuple[list[int], list[float]]:
        tokens, logprobs = list(prompt), []
        for _ in range(number):
            padded = np.zeros(LENGTH, np.int32)
            padded[: len(tokens)] = tokens
            logits = np.asarray(forward(padded, len(tokens)), np.float64)
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.max() - np.log(np.exp(logits).sum())))
        return tokens[len(prompt) :], logprobs

    return answer


def _ids(completion: Any) -> list[int]:
    return [token.token_id for token in completion.tokens(timeout_s=60)]


PROMPTS = [(1, 2, 3), (9,), (5, 6, 7, 8, 9, 10, 11), (60, 61), (3,) * 35, (20, 21, 22, 23), (7, 7)]
NUMBERS = [11, 2, 20, 1, 9, 4, 13]


def test_requests_join_and_leave_and_get_what_they_would_get_alone(
    engine: BatchingEngine, alone: Any
) -> None:
    under_way = []
    for prompt, number in zip(PROMPTS, NUMBERS, strict=True):
        under_way.append(engine.submit(prompt, SamplingParams(max_new_tokens=number)))
        if len(under_way) % 2:
            under_way[0].get(timeout_s=60) if len(under_way) == 1 else time.sleep(0.01)
    for completion, prompt, number in zip(under_way, PROMPTS, NUMBERS, strict=True):
        tokens = list(completion.tokens(timeout_s=60))
        want, logprobs = alone(prompt, number)
        skipped = number - len(tokens)  # the one that was taken above
        assert [t.token_id for t in tokens] == want[skipped:]
        np.testing.assert_allclose([t.logprob for t in tokens], logprobs[skipped:], atol=1e-4)
        assert [t.finish_reason for t in tokens] == [None] * (len(tokens) - 1) + ["length"]
    stats = engine.stats()
    assert (stats["requests_waiting"], stats["requests_running"]) == (0, 0)
    assert stats["tokens"] == sum(NUMBERS)
    assert stats["steps"] < sum(NUMBERS)  # tokens of several requests came from one step


@pytest.mark.ci
def test_draws_depend_on_the_seed_alone(engine: BatchingEngine) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(13, do_sample=True, temperature=1.5, top_k=40, top_p=0.95, seed=seed)

    first = _ids(engine.submit((1, 2, 3), params(seed=5)))
    crowd = [engine.submit((4, 5), SamplingParams(7)), engine.submit((1, 2, 3), params(seed=6))]
    again = _ids(engine.submit((1, 2, 3), params(seed=5)))
    others = [_ids(one) for one in crowd]
    assert again == first
    assert others[1] != first


def test_a_stop_token_ends_a_request_and_comes_with_it(engine: BatchingEngine, alone: Any) -> None:
    want, _ = alone((1, 2, 3), 12)
    stop = want[4]
    params = SamplingParams(12, stop_token_ids=(stop,))
    tokens = list(engine.submit((1, 2, 3), params).tokens(timeout_s=60))
    assert [t.token_id for t in tokens] == want[: want.index(stop) + 1]
    assert tokens[-1].finish_reason == "stop"


@pytest.mark.ci
def test_the_cache_ends_a_request(engine: BatchingEngine, alone: Any) -> None:
    prompt = tuple(range(LENGTH - 3))
    tokens = list(engine.submit(prompt, SamplingParams(100)).tokens(timeout_s=60))
    assert [t.token_id for t in tokens] == alone(prompt, 3)[0]
    assert tokens[-1].finish_reason == "length"


@pytest.mark.ci
def test_cancelled_requests_leave_their_slots_and_the_queue(engine: BatchingEngine) -> None:
    long = [engine.submit((1,), SamplingParams(LENGTH)) for _ in range(3)]
    waiting = engine.submit((2,), SamplingParams(LENGTH))
    waiting.cancel()
    for one in long:
        one.get(timeout_s=60)
        one.cancel()
    for one in (*long, waiting):
        last = list(one.tokens(timeout_s=60))[-1]
        # Whoever had been dispatched to its end may end so.
        assert last.finish_reason in ("cancelled", "length")
    assert len(_ids(engine.submit((1, 2), SamplingParams(5)))) == 5
    assert engine.stats()["requests_running"] == 0


def test_no_more_wait_than_are_admitted(parts: tuple[Steps, Any]) -> None:
    with BatchingEngine(*parts, queue_size=1) as engine:
        taken = []
        with pytest.raises(QueueFullError, match="queue_size=1"):
            for _ in range(50):
                taken.append(engine.submit((1,), SamplingParams(LENGTH)))
        assert all(len(_ids(one)) == LENGTH - 1 for one in taken)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ((), {}, ServingError, "empty"),
        ((1,) * LENGTH, {}, PromptTooLongError, f"{LENGTH} tokens"),
        ((64,), {}, ServingError, "token 64"),
        ((-1,), {}, ServingError, "from 0 to 63"),
        ((1.5,), {}, ServingError, "token 1.5"),
        ((1,), {"max_new_tokens": 0}, ServingError, "max_new_tokens=0"),
        ((1,), {"top_k": -1}, ServingError, "top_k=-1"),
        ((1,), {"top_p": 0.0}, ServingError, "top_p=0.0"),
        ((1,), {"top_p": float("nan")}, ServingError, "top_p=nan"),
        ((1,), {"temperature": 0.0}, ServingError, "do_sample=False"),
        ((1,), {"temperature": float("inf")}, ServingError, "temperature=inf"),
        ((1,), {"seed": "x"}, ServingError, "seed='x'"),
    ],
)
def test_what_cannot_be_served(
    engine: BatchingEngine, prompt: Any, params: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        engine.submit(prompt, SamplingParams(**params))
    assert engine.stats()["requests_waiting"] == 0


@pytest.mark.ci
def test_closing_ends_all_requests(parts: tuple[Steps, Any]) -> None:
    engine = BatchingEngine(*parts)
    under_way = [engine.submit((1,), SamplingParams(LENGTH)) for _ in range(5)]
    under_way[0].get(timeout_s=60)
    engine.close()
    engine.close()
    for one in under_way[1:]:
        with pytest.raises(EngineStoppedError, match="closed"):
            list(one.tokens(timeout_s=5))
    with pytest.raises(EngineStoppedError, match="closed"):
        engine.submit((1,), SamplingParams())


@pytest.mark.parametrize("where", ["prefill", "decode", "hand_out"])
def test_a_step_that_fails_ends_all_requests(
    parts: tuple[Steps, Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    if where == "hand_out":
        monkeypatch.setattr("examples.llm_serving.engine.unpack_tokens", fail)
    else:
        monkeypatch.setattr(parts[0], where, fail)
    with BatchingEngine(*parts) as engine:
        taken = []
        for number in (2, 9, 9, 9, 9):
            try:
                taken.append(engine.submit((1,), SamplingParams(number)))
            except EngineStoppedError:  # it has failed already
                break
        assert taken
        for one in taken:
            with pytest.raises(EngineStoppedError, match="out of memory"):
                list(one.tokens(timeout_s=30))
        with pytest.raises(EngineStoppedError, match="out of memory"):
            engine.submit((1,), SamplingParams())


def test_generate_asks_for_more_rows_than_may_wait(parts: tuple[Steps, Any], alone: Any) -> None:
    with LanguageModel(CONFIG, BatchingEngine(*parts, queue_size=2)) as model:
        rows = [[number, 5] for number in range(9)]
        got = model.generate(rows, max_new_tokens=4)
        np.testing.assert_array_equal(got, [[*row, *alone(tuple(row), 4)[0]] for row in rows])
        with pytest.raises(ServingError, match="max_length=2"):
            model.generate(rows, max_length=2)
        with pytest.raises(ServingError, match="attention_mask"):
            model.generate(rows, attention_mask=[[1, 1]])
        with pytest.raises(ServingError, match="rows of token ids"):
            model.generate([1, 2, 3])


def test_programs_are_made_before_the_first_request(parts: tuple[Steps, Any], alone: Any) -> None:
    with BatchingEngine(*parts, steps_per_call=3, warm_up_lengths=(3,)) as engine:
        assert _ids(engine.submit((1, 2, 3), SamplingParams(5))) == alone((1, 2, 3), 5)[0]


def test_a_client_may_wait_for_a_limited_time(parts: tuple[Steps, Any]) -> None:
    with BatchingEngine(*parts) as engine:
        completion = engine.submit((1,), SamplingParams(1))
        assert len(_ids(completion)) == 1
        with pytest.raises(queue.Empty):
            completion.get(timeout_s=0.01)


def test_random_models_are_refused_with_the_reason() -> None:
    from examples.llm_serving.config import ModelError

    with pytest.raises(ModelError, match="max_length=49"):
        random_model(CONFIG, max_length=49)
    with pytest.raises(ModelError, match="num_slots=3"):
        random_model(CONFIG, num_slots=3, num_groups=2)
    with pytest.raises(ModelError, match="dtype='int8'"):
        random_model(CONFIG, dtype="int8")


def test_every_padded_length_is_compiled_before_the_first_request(parts: tuple[Steps, Any]) -> None:
    """A longer prompt than all before compiles nothing, so nobody waits for it."""
    assert all_padded_lengths(48) == (32, 48) and all_padded_lengths(128) == (32, 64, 128)
    assert all_padded_lengths(7) == (7,)
    steps, params = parts
    with BatchingEngine(steps, params, warm_up_lengths=None) as engine:
        before = len(steps._prefill[False].compiled_entries())
        for length in (3, 20, 33, 40):
            list(engine.submit([1] * length, SamplingParams(max_new_tokens=2)).tokens(60.0))
        assert len(steps._prefill[False].compiled_entries()) == before


def test_a_loop_that_does_not_come_around_is_stuck(
    parts: tuple[Steps, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, params = parts
    go_on = threading.Event()
    decode = steps.decode

    def waiting(*args: Any, **kwargs: Any) -> Any:
        go_on.wait(60)
        return decode(*args, **kwargs)

    with BatchingEngine(steps, params) as engine:
        assert engine.stuck_s == 0
        monkeypatch.setattr(steps, "decode", waiting)
        completion = engine.submit([1, 2], SamplingParams(max_new_tokens=4))
        until_s = time.monotonic() + 60
        while engine.stuck_s < 0.3:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        go_on.set()
        assert len(list(completion.tokens(60.0))) == 4
