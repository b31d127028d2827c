"""A language model: from a folder of weights to `generate`, as in transformers.

with load("folder") as model:
    answers = model.generate(prompts, max_new_tokens=20)
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import autopar
from examples.llm_serving.config import DTYPES, ModelConfig, ModelError, read_config
from examples.llm_serving.engine import BatchingEngine
from examples.llm_serving.requests import Completion, QueueFullError, SamplingParams, ServingError
from examples.llm_serving.steps import Steps
from examples.llm_serving.weights import load_params, random_params


class LanguageModel:
    """A model on the devices of this process, with an `engine` that batches its requests."""

    def __init__(self, config: ModelConfig, engine: BatchingEngine) -> None:
        self.config = config
        self.engine = engine

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()

    @property
    def plan(self) -> autopar.ParallelPlan:
        """Decode's plan, which places parameters and cache."""
        return self.engine.plan

    def generate(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> Any:
        """Returns the prompts with their answers.

        input_ids:      (rows, length), or a list of prompts of different lengths.
        attention_mask: of the same shape: 0 where a prompt is padded, left or right.
        max_length:     length of prompt and answer together, padding included; `max_new_tokens`,
                        the length of the answer alone, takes precedence. Default: `max_length=20`.
        top_k:          0 for all tokens.
        seed:           of the first row's draws; each further row adds one.
        eos_token_id:   one or several tokens that end an answer; None for the model's own, an
                        empty list for none.
        pad_token_id:   fills rows that end early; by default the model's own, or the first token
                        that ends an answer, or 0.

        Returns an int array (rows, longest), or for a list of prompts of different lengths a list
        of lists without padding.
        """
        rows, prompts = _prompts(input_ids, attention_mask)
        stops = self.config.eos_token_ids if eos_token_id is None else _as_tuple(eos_token_id)
        wanted = [
            SamplingParams(
                max_new_tokens=_num_new(len(row), max_length, max_new_tokens),
                do_sample=do_sample,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed + number,
                stop_token_ids=stops,
            )
            for number, row in enumerate(rows)
        ]
        answers = self._answers(prompts, wanted)
        whole = [[*row, *answer] for row, answer in zip(rows, answers, strict=True)]
        if len({len(row) for row in rows}) > 1:
            return whole
        if pad_token_id is None:
            pad_token_id = self.config.pad_token_id
        if pad_token_id is None:
            pad_token_id = stops[0] if stops else 0
        longest = max(map(len, whole))
        return np.array([row + [pad_token_id] * (longest - len(row)) for row in whole])

    def _answers(self, prompts: list[list[int]], wanted: list[SamplingParams]) -> list[list[int]]:
        """Submits all prompts at once, as far as the queue admits them."""
        under_way: collections.deque[Completion] = collections.deque()
        asked, answers = [], []
        try:
            for prompt, params in zip(prompts, wanted, strict=True):
                while True:
                    try:
                        asked.append(self.engine.submit(prompt, params))
                    except QueueFullError:
                        if not under_way:
                            raise
                        answers.append(_collected(under_way.popleft()))
                        continue
                    under_way.append(asked[-1])
                    break
            answers += [_collected(one) for one in under_way]
        except BaseException:
            for one in asked:
                one.cancel()
            raise
        return answers


def load(
    folder: str | Path,
    *,
    dtype: Any = None,
    method: Any = None,
    num_slots: int = 8,
    max_length: int | None = None,
    num_groups: int | None = None,
    **engine: Any,
) -> LanguageModel:
    """The model in a local folder (`config.json`, `*.safetensors`), on the devices of this process.

    dtype:      of weights, cache and computation; default: the folder's.
    method:     how decode is parallelized; default: `autopar.ShardParallel()`.
    num_slots:  requests decoded together.
    max_length: tokens of prompt and answer; default: what the model was trained for.
    num_groups: groups of slots whose steps are in flight at the same time; default: the
                method's number of stages. It must divide `num_slots`.
    engine:     further options of `BatchingEngine`: `queue_size`, `steps_per_call`, …
    """
    config = read_config(folder)
    steps, num_groups = _make_steps(config, dtype, method, num_slots, max_length, num_groups)
    params = load_params(folder, config, steps.dtype, steps.param_shardings())
    name = Path(folder).resolve().name
    return LanguageModel(
        config,
        BatchingEngine(steps, params, model_name=name, num_groups=num_groups, **engine),
    )


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    model_name: str = "random",
    dtype: Any = None,
    method: Any = None,
    num_slots: int = 8,
    max_length: int | None = None,
    num_groups: int | None = None,
    **engine: Any,
) -> LanguageModel:
    """A model of this shape with random weights, created on the devices; otherwise as `load`."""
    steps, num_groups = _make_steps(config, dtype, method, num_slots, max_length, num_groups)
    params = random_params(config, steps.dtype, steps.param_shardings(), seed)
    return LanguageModel(
        config,
        BatchingEngine(steps, params, model_name=model_name, num_groups=num_groups, **engine),
    )


def _make_steps(
    config: ModelConfig,
    dtype: Any,
    method: Any,
    num_slots: int,
    max_length: int | None,
    num_groups: int | None,
) -> tuple[Steps, int]:
    length = config.max_positions if max_length is None else max_length
    if not 2 <= length <= config.max_positions:
        raise ModelError(
            f"max_length={max_length!r}: expected a number from 2 to {config.max_positions}, the "
            "positions of the model."
        )
    if num_groups is None:
        num_groups = _num_stages(method)
    if num_slots < 1 or num_slots % num_groups:
        raise ModelError(
            f"num_slots={num_slots}: expected a multiple of the {num_groups} groups of slots."
        )
    steps = Steps(
        config,
        num_slots=num_slots // num_groups,
        length=length,
        dtype=_checked_dtype(dtype or config.dtype),
        method=autopar.ShardParallel() if method is None else method,
    )
    return steps, num_groups


def _num_stages(method: Any) -> int:
    """The method's number of stages; 1 if it searches them or has none."""
    stages = getattr(method, "stages", None)
    if isinstance(stages, autopar.UniformStages):
        return stages.num_stages
    if isinstance(stages, autopar.ManualStages):
        return len(stages.layer_ids)
    return 1


def _checked_dtype(given: Any) -> np.dtype:
    try:
        dtype = np.dtype(jnp.dtype(given))
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in DTYPES:
        raise ModelError(f"dtype={given!r}: expected one of {', '.join(DTYPES)}.")
    return dtype


def _prompts(input_ids: Any, attention_mask: Any) -> tuple[list[list[int]], list[list[int]]]:
    """(the given rows, their prompts without padding)."""
    rows = [_as_row(row) for row in _as_list(input_ids, "input_ids")]
    if attention_mask is None:
        return rows, rows
    masks = [_as_row(row) for row in _as_list(attention_mask, "attention_mask")]
    if [len(mask) for mask in masks] != [len(row) for row in rows]:
        raise ServingError(
            "attention_mask: its shape differs from input_ids; give a 0 or 1 for every token."
        )
    kept = [
        [token for token, is_kept in zip(row, mask, strict=True) if is_kept]
        for row, mask in zip(rows, masks, strict=True)
    ]
    return rows, kept


def _as_list(value: Any, name: str) -> list[Any]:
    rows = list(value)
    if not rows or not all(hasattr(row, "__len__") for row in rows):
        raise ServingError(f"{name}: expected rows of token ids, (rows, length), at least one.")
    return rows


def _as_row(row: Any) -> list[int]:
    return [int(token) for token in (row.tolist() if hasattr(row, "tolist") else row)]


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _num_new(length: int, max_length: int | None, max_new_tokens: int | None) -> int:
    if max_new_tokens is not None:
        return max_new_tokens
    max_length = 20 if max_length is None else max_length
    if max_length <= length:
        raise ServingError(
            f"max_length={max_length}: the prompt already has {length} tokens. Give a larger "
            "max_length, or max_new_tokens."
        )
    return max_length - length


def _collected(completion: Completion) -> list[int]:
    return [t.token_id for t in completion.tokens() if t.token_id is not None]
