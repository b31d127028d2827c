"""Continuous batching: from requests of different lengths to tokens, step by step.

The cache has slots. A request waits in a bounded queue until a slot is free. Prefill fills the slot
and returns the first token; then every decode step produces one token per slot. When the request
ends, its slot is free for the next. Requests join and leave between steps.

Slots form *groups*, each with its own state, whose steps are dispatched in turn. One group is
enough on a mesh. On a pipeline, while one stage works on a group, the others work on other groups.

One thread runs the loop. It dispatches a step before it looks at the tokens of the previous one, so
devices do not wait for the host. It therefore notices a stop token one step late and discards what
the slot produced meanwhile.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from examples.llm_serving.histograms import Histogram
from examples.llm_serving.requests import (
    Completion,
    EngineStoppedError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    ServingError,
    Token,
)
from examples.llm_serving.steps import Slots, Steps, pack_request, unpack_tokens

_MIN_PADDED = 32


@dataclasses.dataclass(eq=False)
class _Running:
    """A request in a slot.

    Attributes:
      limit: the maximum number of tokens.
      num_dispatched: tokens that the dispatched steps will produce.
      num_given: tokens that the client has.
      given_s: when it got the last one.
    """

    completion: Completion
    limit: int
    num_dispatched: int = 0
    num_given: int = 0
    given_s: float = 0.0
    is_over: bool = False


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A dispatched step: its future tokens and their requests; `slot` is -1 for prefill's token."""

    packed: jax.Array
    takers: tuple[tuple[int, _Running], ...]


class _Group:
    """Slots that step together."""

    def __init__(self, cache: Any, state: Slots, num_slots: int) -> None:
        self.cache = cache
        self.state = state
        self.slots: list[_Running | None] = [None] * num_slots
        self.under_way: collections.deque[_Dispatched] = collections.deque()

    @property
    def running(self) -> list[tuple[int, _Running]]:
        return [(i, one) for i, one in enumerate(self.slots) if one is not None]


class BatchingEngine:
    """Serves completions of one model; the `Engine` of `requests.py`.

    Args:
      steps: the programs, for the slots of one group.
      params: the model's parameters, in the shardings of `steps.param_shardings()`.
      num_groups: groups of slots.
      queue_size: requests that may wait.
      steps_per_call: decode steps per call while some request needs that many; surplus tokens are
        discarded. More steps leave less work to the host and let requests join less often.
      attended_lengths: while no sequence is longer than one of these, decode reads only that much
        of the cache. Each length has its own program.
      warm_up_lengths: prompt lengths whose programs, and decode's, are compiled now and not at the
        first request, when other requests would wait for it; None for all lengths.
        `warm_up_sampling`: also the programs that sample.
    """

    def __init__(
        self,
        steps: Steps,
        params: Any,
        *,
        model_name: str = "model",
        num_groups: int = 1,
        queue_size: int = 256,
        steps_per_call: int = 1,
        attended_lengths: Sequence[int] = (),
        warm_up_lengths: Sequence[int] | None = (),
        warm_up_sampling: bool = False,
    ) -> None:
        self.model_name = model_name
        self.max_length = steps.length
        self.vocab_size = steps.config.vocab_size
        self.plan = steps.plan
        self._steps = steps
        self._params = params
        self._queue_size = queue_size
        self._steps_per_call = steps_per_call
        self._attended = sorted({min(n, steps.length) for n in (*attended_lengths, steps.length)})
        self._groups = [
            _Group(steps.make_cache(), steps.make_slots(), steps.num_slots)
            for _ in range(num_groups)
        ]
        self._waiting: collections.deque[Completion] = collections.deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._num_tokens = self._num_steps = self._num_requests = 0
        self._moved_s = time.monotonic()  # when the loop last came around
        self.histograms = {
            "time_to_first_token_seconds": Histogram(),
            "time_per_output_token_seconds": Histogram(),
            "request_seconds": Histogram(),
        }
        if warm_up_lengths is None:
            warm_up_lengths = all_padded_lengths(self.max_length)
        if warm_up_lengths:
            for may_sample in (False, True) if warm_up_sampling else (False,):
                self._warm_up(self._groups[0], warm_up_lengths, may_sample)
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    # -- the clients' side

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        completion = Completion(prompt, params)
        self._check(completion)
        with self._changed:
            self._check_open()
            if len(self._waiting) >= self._queue_size:
                raise QueueFullError(
                    f"The queue is full: {len(self._waiting)} requests are waiting "
                    f"(queue_size={self._queue_size}). Try again later."
                )
            self._waiting.append(completion)
            self._num_requests += 1
            self._changed.notify_all()
        return completion

    @property
    def failure(self) -> Exception | None:
        """Why the engine stopped; None while it serves."""
        try:
            self._check_open()
        except EngineStoppedError as error:
            return error
        return None

    @property
    def stuck_s(self) -> float:
        """For how long the loop has been at one step, though there is work; 0 without work."""
        with self._changed:
            has_work = bool(self._waiting) or any(g.under_way or g.running for g in self._groups)
            return time.monotonic() - self._moved_s if has_work else 0.0

    def stats(self) -> dict[str, float]:
        with self._changed:
            return {
                "requests_waiting": len(self._waiting),
                "requests_running": sum(len(group.running) for group in self._groups),
                "requests": self._num_requests,
                "tokens": self._num_tokens,
                "steps": self._num_steps,
            }

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=120)

    def __enter__(self) -> BatchingEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(
                f"The engine stopped because a step failed: {self._failure!r}. Restart it."
            ) from self._failure
        if self._is_closing:
            raise EngineStoppedError("The engine was closed. Start a new one.")

    def _check(self, completion: Completion) -> None:
        prompt, params = completion.prompt, completion.params
        if not prompt:
            raise ServingError("The prompt is empty. Give at least one token.")
        if len(prompt) >= self.max_length:
            raise PromptTooLongError(
                f"The prompt has {len(prompt)} tokens, and prompt and answer together may have "
                f"{self.max_length}. Shorten it to {self.max_length - 1} tokens, or serve the "
                "model with a larger max_length."
            )
        for token in prompt:
            if not _is_whole(token) or not 0 <= token < self.vocab_size:
                raise ServingError(
                    f"The prompt has the token {token!r}; tokens of this model are integers "
                    f"from 0 to {self.vocab_size - 1}."
                )
        if not _is_whole(params.max_new_tokens) or params.max_new_tokens < 1:
            raise _unfit("max_new_tokens", params.max_new_tokens, "a whole number ≥ 1")
        if not _is_whole(params.top_k) or not 0 <= params.top_k < 2**31:
            raise _unfit("top_k", params.top_k, "an integer ≥ 0 (0 for all tokens)")
        if not _is_whole(params.seed):
            raise _unfit("seed", params.seed, "a whole number")
        if not _is_real(params.temperature) or not 0 < params.temperature < math.inf:
            raise _unfit("temperature", params.temperature, "a number > 0; do_sample=False for 0")
        if not _is_real(params.top_p) or not 0 < params.top_p <= 1:
            raise _unfit("top_p", params.top_p, "a number above 0 and at most 1")

    def _warm_up(self, group: _Group, lengths: Sequence[int], may_sample: bool) -> None:
        """Runs every program once, on a slot that the first request overwrites."""
        params = SamplingParams(do_sample=may_sample)
        for padded in sorted({padded_length(n, self.max_length) for n in lengths}):
            request = pack_request((0,), 0, params, padded)
            group.cache, group.state, _ = self._steps.prefill(
                group.cache, self._params, group.state, request, may_sample=may_sample
            )
        for attended in self._attended:
            for num_steps in {1, self._steps_per_call}:
                group.cache, group.state, packed = self._steps.decode(
                    group.cache,
                    self._params,
                    group.state,
                    may_sample=may_sample,
                    num_steps=num_steps,
                    attended=attended,
                )
                packed.block_until_ready()

    # -- the loop

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._wait_for_work():
                for group in self._groups:
                    self._advance(group)
        except BaseException as failure:  # it ends the requests, and with them their clients
            error = failure
        with self._changed:
            self._failure, self._is_closing = error, True
            ended = [*self._waiting, *(o.completion for g in self._groups for _, o in g.running)]
            self._waiting.clear()
        # Requests that have left their slots may still wait for tokens.
        late = [one for g in self._groups for d in g.under_way for _, one in d.takers]
        ended += [one.completion for one in late if not one.is_over]
        for completion in dict.fromkeys(ended):
            stopped = EngineStoppedError(
                "The engine was closed while the request waited or ran."
                if error is None
                else f"The engine stopped because a step failed: {error!r}."
            )
            stopped.__cause__ = error
            completion.put(stopped)
        self._groups, self._params = [], None

    def _wait_for_work(self) -> bool:
        """Returns False when the engine should stop."""
        with self._changed:
            self._moved_s = time.monotonic()
            while not self._is_closing:
                if self._waiting or any(g.under_way or g.running for g in self._groups):
                    return True
                self._changed.wait(timeout=1.0)
                self._moved_s = time.monotonic()
            return False

    def _advance(self, group: _Group) -> None:
        """Dispatches the next steps, then hands out the tokens of earlier ones."""
        self._drop_cancelled(group)
        self._admit(group)
        dispatched = self._dispatch_decode(group)
        # One step stays in flight, unless there is nothing else to do.
        self._hand_out(group, 1 if dispatched else 0)

    def _drop_cancelled(self, group: _Group) -> None:
        for slot, one in group.running:
            if one.completion.cancelled:
                _end(one, Token(None, finish_reason="cancelled"))
                group.slots[slot] = None
        with self._changed:
            dropped = [c for c in self._waiting if c.cancelled]
            for completion in dropped:
                self._waiting.remove(completion)
        for completion in dropped:
            completion.put(Token(None, finish_reason="cancelled"))

    def _admit(self, group: _Group) -> None:
        free = [slot for slot, one in enumerate(group.slots) if one is None]
        for slot in free:
            with self._changed:
                if not self._waiting:
                    return
                completion = self._waiting.popleft()
                room = self.max_length - len(completion.prompt)
                one = _Running(completion, min(completion.params.max_new_tokens, room))
                group.slots[slot] = one
            params = completion.params
            padded = padded_length(len(completion.prompt), self.max_length)
            request = pack_request(completion.prompt, slot, params, padded)
            group.cache, group.state, packed = self._steps.prefill(
                group.cache, self._params, group.state, request, may_sample=params.do_sample
            )
            self._note(group, packed, ((-1, one),), 1)
            self._hand_out(group, len(group.under_way))

    def _dispatch_decode(self, group: _Group) -> bool:
        takers = tuple(group.running)
        if not takers:
            return False
        left = max(one.limit - one.num_dispatched for _, one in takers)
        num_steps = self._steps_per_call if left >= self._steps_per_call else 1
        longest = max(len(one.completion.prompt) + one.num_dispatched for _, one in takers)
        group.cache, group.state, packed = self._steps.decode(
            group.cache,
            self._params,
            group.state,
            may_sample=any(one.completion.params.do_sample for _, one in takers),
            num_steps=num_steps,
            attended=next((n for n in self._attended if n >= longest + num_steps), None),
        )
        self._note(group, packed, takers, num_steps)
        return True

    def _note(
        self,
        group: _Group,
        packed: jax.Array,
        takers: tuple[tuple[int, _Running], ...],
        num_steps: int,
    ) -> None:
        """Records a dispatched step. Requests that it completes leave their slots."""
        packed.copy_to_host_async()
        group.under_way.append(_Dispatched(packed, takers))
        with self._changed:
            self._num_steps += num_steps
            for _, one in takers:
                one.num_dispatched += num_steps
            for slot, one in group.running:
                if one.num_dispatched >= one.limit:
                    group.slots[slot] = None

    def _hand_out(self, group: _Group, num_kept: int) -> None:
        """Hands out the tokens of all finished steps, and of the oldest until `num_kept` remain."""
        steps = group.under_way
        while steps and (len(steps) > num_kept or steps[0].packed.is_ready()):
            self._give_all(steps[0])
            steps.popleft()

    def _give_all(self, step: _Dispatched) -> None:
        tokens, logprobs = unpack_tokens(step.packed)
        if step.takers[0][0] < 0:
            tokens, logprobs = tokens.reshape(1, 1), logprobs.reshape(1, 1)
        rows, logprob_rows = tokens.T.tolist(), logprobs.T.tolist()
        num_given = 0
        for slot, one in step.takers:
            for token, logprob in zip(rows[max(slot, 0)], logprob_rows[max(slot, 0)], strict=True):
                if one.is_over:
                    break
                one.num_given += 1
                num_given += 1
                self._give(one, token, logprob)
        with self._changed:
            self._num_tokens += num_given

    def _give(self, one: _Running, token: int, logprob: float) -> None:
        now_s = time.monotonic()
        if one.num_given == 1:
            waited_s = now_s - one.completion.begun_s
            self.histograms["time_to_first_token_seconds"].add(waited_s)
        else:
            self.histograms["time_per_output_token_seconds"].add(now_s - one.given_s)
        one.given_s = now_s
        if token in one.completion.stops:
            self._free(one)  # counted before the client hears of the end
            _end(one, Token(token, logprob, "stop"))
        elif one.num_given >= one.limit:
            self._free(one)
            _end(one, Token(token, logprob, "length"))
        else:
            one.completion.put(Token(token, logprob))

    def _free(self, one: _Running) -> None:
        waited_s = time.monotonic() - one.completion.begun_s
        self.histograms["request_seconds"].add(waited_s)
        for group in self._groups:
            for slot, other in enumerate(group.slots):
                if other is one:
                    group.slots[slot] = None
                    return


def _end(one: _Running, token: Token) -> None:
    one.is_over = True
    one.completion.put(token)


def padded_length(length: int, max_length: int) -> int:
    """The padded length of a prompt: a power of two, so that there are few programs."""
    return min(max(_MIN_PADDED, 1 << (length - 1).bit_length()), max_length)


def all_padded_lengths(max_length: int) -> tuple[int, ...]:
    """Every padded length of a prompt: with their programs compiled, no prompt stalls others."""
    lengths = [padded_length(1, max_length)]
    while lengths[-1] < max_length:
        lengths.append(padded_length(lengths[-1] + 1, max_length))
    return tuple(lengths)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _unfit(name: str, given: Any, needed: str) -> ServingError:
    return ServingError(f"{name}={given!r}: expected {needed}.")
