"""The two programs of serving, parallelized: from a model's shape to `prefill` and `decode`.

Both take and return state that stays on the devices, donated and updated in place:

    cache               keys and values of every layer (slots, kv heads, length, head size)
    slots: tokens       the last token of every slot, which is not in the cache yet
           positions    where that token belongs
           settings     how the next token is chosen

Decode's plan places parameters and state, and every other program follows it (`FollowParallel`).
Tokens go from step to step on the devices; the host gets a copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

import autopar
from examples.llm_serving import decoder
from examples.llm_serving.config import ModelConfig
from examples.llm_serving.requests import SamplingParams
from examples.llm_serving.sampling import choose_tokens

Slots = dict[str, Any]

_DECODE: Any = {"donate_argnums": (0, 2), "batch_argnums": (2,)}
_PREFILL: Any = {"donate_argnums": (0, 2), "batch_argnums": (2, 3)}

_HEAD = 7  # numbers before the tokens in a packed request


def pack_request(
    prompt: tuple[int, ...], slot: int, params: SamplingParams, padded_length: int
) -> np.ndarray:
    """Everything prefill needs of a request in one array, which takes one copy."""
    packed = np.zeros(_HEAD + padded_length, np.int32)
    packed[:4] = len(prompt), slot, params.do_sample, params.top_k
    packed[4:5] = np.array([params.seed % 2**32], np.uint32).view(np.int32)
    packed[5:7] = np.array([params.temperature, params.top_p], np.float32).view(np.int32)
    packed[_HEAD : _HEAD + len(prompt)] = prompt
    return packed


def _unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """(tokens, length, slot, settings)."""
    floats = lax.bitcast_convert_type(packed[5:7], jnp.float32)
    settings = {
        "do_sample": packed[2] != 0,
        "top_k": packed[3],
        "seed": lax.bitcast_convert_type(packed[4], jnp.uint32),
        "temperature": floats[0],
        "top_p": floats[1],
    }
    return packed[_HEAD:], packed[0], packed[1], settings


def _pack_tokens(tokens: jax.Array, logprobs: jax.Array) -> jax.Array:
    return jnp.stack([tokens, lax.bitcast_convert_type(logprobs, jnp.int32)])


def unpack_tokens(packed: Any) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, log-probabilities) of a step's packed result: (steps, slots) for decode, one each
    for prefill. Waits for the step."""
    rows = np.asarray(packed)
    return rows[0], rows[1].view(np.float32)


class Steps:
    """`prefill` and `decode` of a model for a number of slots; compiled when first called.

    method: decode's method: `ShardParallel(…)`, `PipeshardParallel(…)` or another one.
    """

    def __init__(
        self, config: ModelConfig, *, num_slots: int, length: int, dtype: Any, method: Any
    ) -> None:
        self.config = config
        self.num_slots = num_slots
        self.length = length
        self.dtype = np.dtype(dtype)
        self._params = decoder.param_types(config, dtype)
        self._leader = autopar.parallelize(
            self._decode_function(False, 1, length), method=method, **_DECODE
        )
        self._decode = {(False, 1, length): self._leader}
        self._prefill: dict[bool, Any] = {}
        cache = jax.eval_shape(self._make_cache)
        self.plan = self._leader.plan(cache, self._params, self.make_slots())

    # -- placement

    def param_shardings(self) -> Any:
        """A sharding for every parameter, in their pytree."""
        _, specs, _ = self.plan.input_specs
        _, stages, _ = self.plan.input_stages
        meshes = self._meshes()
        return jax.tree.map(
            lambda spec, leaf_stages: NamedSharding(meshes[leaf_stages[0]], spec),
            specs,
            stages,
            is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
        )

    def _meshes(self) -> list[Mesh]:
        plan, devices = self.plan, jax.devices()
        if not plan.is_pipeline:
            count = plan.num_devices
            grid = np.array(devices[:count]).reshape(plan.mesh_shape)
            return [Mesh(grid, plan.axis_names)]
        return [
            Mesh(
                np.array([devices[d] for d in stage.devices]).reshape(stage.mesh_shape),
                stage.plan.axis_names,
            )
            for stage in plan.stages
        ]

    def make_cache(self) -> decoder.Cache:
        """An empty cache, created where the plan places it."""
        create = autopar.parallelize(
            lambda _: self._make_cache(),
            method=autopar.CreateStateParallel(self._leader, (self._params, self.make_slots())),
            batch_argnums=(),
        )
        return create(np.int32(0))

    def _make_cache(self) -> decoder.Cache:
        return decoder.make_cache(self.config, self.num_slots, self.length, self.dtype)

    def make_slots(self) -> Slots:
        """Idle slots."""
        count = self.num_slots
        return {
            "tokens": np.zeros(count, np.int32),
            "positions": np.zeros(count, np.int32),
            "settings": {
                "do_sample": np.zeros(count, bool),
                "top_k": np.zeros(count, np.int32),
                "seed": np.zeros(count, np.uint32),
                "temperature": np.ones(count, np.float32),
                "top_p": np.ones(count, np.float32),
            },
        }

    # -- running

    def prefill(
        self, cache: Any, params: Any, slots: Slots, request: np.ndarray, *, may_sample: bool
    ) -> tuple[Any, Slots, jax.Array]:
        """A packed request into its slot -> cache, slots, its first token for `unpack_tokens`."""
        if may_sample not in self._prefill:
            self._prefill[may_sample] = autopar.parallelize(
                self._prefill_function(may_sample),
                method=autopar.FollowParallel(self._leader),
                **_PREFILL,
            )
        return self._prefill[may_sample](cache, params, slots, request)

    def decode(
        self,
        cache: Any,
        params: Any,
        slots: Slots,
        *,
        may_sample: bool,
        num_steps: int = 1,
        attended: int | None = None,
    ) -> tuple[Any, Slots, jax.Array]:
        """`num_steps` more tokens in every slot -> cache, slots, tokens for `unpack_tokens`.

        may_sample: whether some slot samples.
        attended:   entries of the cache to read, more than any slot fills; default: all.
        """
        key = (may_sample, num_steps, attended or self.length)
        if key not in self._decode:
            self._decode[key] = autopar.parallelize(
                self._decode_function(*key),
                method=autopar.FollowParallel(self._leader),
                **_DECODE,
            )
        return self._decode[key](cache, params, slots)

    def _prefill_function(self, may_sample: bool) -> Any:
        config = self.config

        def prefill(cache: Any, params: Any, slots: Slots, request: jax.Array) -> Any:
            tokens, length, slot, settings = _unpack(request)
            cache, logits = decoder.prefill(config, params, cache, tokens, length, slot)
            slot_settings = jax.tree.map(lambda x: x[None], settings)
            token, logprob = choose_tokens(
                logits[None], slot_settings, length[None], may_sample=may_sample
            )
            new = {"tokens": token[0], "positions": length, "settings": settings}
            slots = jax.tree.map(lambda old, one: old.at[slot].set(one), slots, new)
            return cache, slots, _pack_tokens(token[0], logprob[0])

        return prefill

    def _decode_function(self, may_sample: bool, num_steps: int, attended: int) -> Any:
        config = self.config

        def one(cache: Any, params: Any, slots: Slots) -> Any:
            positions = slots["positions"]
            cache, logits = decoder.decode(
                config, params, cache, slots["tokens"], positions, attended
            )
            tokens, logprobs = choose_tokens(
                logits, slots["settings"], positions + 1, may_sample=may_sample
            )
            slots = slots | {"tokens": tokens, "positions": positions + 1}
            return cache, slots, _pack_tokens(tokens, logprobs)

        def decode(cache: Any, params: Any, slots: Slots) -> Any:
            if num_steps == 1:
                cache, slots, packed = one(cache, params, slots)
                return cache, slots, packed[:, None]

            def body(carry: Any, _: None) -> Any:
                cache, slots, packed = one(carry[0], params, carry[1])
                return (cache, slots), packed

            (cache, slots), packed = lax.scan(body, (cache, slots), length=num_steps)
            return cache, slots, packed.swapaxes(0, 1)

        return decode
