"""Tokens are drawn as often as a brute-force reading of the settings says."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from examples.llm_serving.sampling import choose_tokens

SIZE, DRAWS = 12, 8000
LOGITS = np.random.default_rng(0).normal(0, 2, SIZE).astype(np.float32)
LOGITS[3] = LOGITS[7]  # a tie


def _probabilities(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, then the k likeliest with what ties, then the fewest that have `top_p`."""
    scaled = LOGITS.astype(np.float64) / temperature
    if top_k:
        kth = np.sort(scaled)[::-1][min(top_k, SIZE) - 1]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    own = np.exp(scaled - scaled.max())
    own /= own.sum()
    kept, total = np.zeros(SIZE), 0.0
    for token in np.argsort(-own, kind="stable"):
        if total >= top_p:
            break
        kept[token], total = own[token], total + own[token]
    return kept / kept.sum()


def _settings(count: int, temperature: float, top_k: int, top_p: float, seeds: np.ndarray) -> dict:
    return {
        "do_sample": np.ones(count, bool),
        "temperature": np.full(count, temperature, np.float32),
        "top_k": np.full(count, top_k, np.int32),
        "top_p": np.full(count, top_p, np.float32),
        "seed": seeds.astype(np.uint32),
    }


choose = jax.jit(lambda *args: choose_tokens(*args, may_sample=True))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (3.0, 4, 1.0), (1.0, 0, 0.7), (2.0, 6, 0.8), (1.0, 99, 1.0),
     (1.0, 0, 1e-6)],
)  # fmt: skip
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    settings = _settings(DRAWS, temperature, top_k, top_p, np.arange(DRAWS))
    tokens, logprobs = choose(np.tile(LOGITS, (DRAWS, 1)), settings, np.full(DRAWS, 9))
    want = _probabilities(temperature, top_k, top_p)
    got = np.bincount(np.asarray(tokens), minlength=SIZE) / DRAWS
    assert not got[want == 0].any()
    # Five standard deviations of a count.
    np.testing.assert_array_less(np.abs(got - want), 5 * np.sqrt(want / DRAWS) + 1e-9)
    raw = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    np.testing.assert_allclose(logprobs, raw[np.asarray(tokens)], rtol=1e-4, atol=1e-5)


def test_settings_are_those_of_each_slot() -> None:
    settings = _settings(4, 1.0, 0, 1.0, np.array([1, 1, 2, 3]))
    settings["do_sample"][3] = False
    settings["top_k"][2] = 1
    logits = np.tile(LOGITS, (4, 1))
    positions = np.array([5, 5, 5, 5])
    tokens, _ = choose(logits, settings, positions)
    assert tokens[0] == tokens[1]  # the same seed at the same position
    assert tokens[2] == tokens[3] == LOGITS.argmax()
    seen = {int(choose(logits, settings, positions + n)[0][0]) for n in range(12)}
    assert len(seen) > 1  # other positions draw anew
