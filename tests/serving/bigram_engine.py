"""A small real engine: a bigram model, jitted, slots, continuous batching in a thread."""

import queue
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from examples.llm_serving.requests import (
    Completion,
    EngineStoppedError,
    PromptTooLongError,
    QueueFullError,
    Token,
)


@jax.jit
def _step(table, tokens, keys, temperature):
    logits = table[tokens]
    logprobs = jax.nn.log_softmax(logits)
    drawn = jax.vmap(jax.random.categorical)(keys, logits / jnp.maximum(temperature, 1e-3)[:, None])
    chosen = jnp.where(temperature > 0, drawn, jnp.argmax(logits, -1))
    keys = jax.vmap(lambda k: jax.random.split(k)[0])(keys)
    return chosen, jnp.take_along_axis(logprobs, chosen[:, None], 1)[:, 0], keys


class BigramEngine:
    model_name = "bigram"

    def __init__(self, vocab_size, max_length=64, slots=4, max_queue=8, step_s=0.0):
        self.vocab_size, self.max_length = vocab_size, max_length
        self.slots, self.max_queue, self.step_s = slots, max_queue, step_s
        self.table = jax.random.normal(jax.random.key(0), (vocab_size, vocab_size)) * 3
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        self.running = [None] * slots
        self.failure = None
        self.num_tokens = self.num_steps = 0
        self.fail_next = False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def submit(self, prompt, params):
        with self.lock:
            if self.failure is not None:
                raise EngineStoppedError(str(self.failure))
            if len(prompt) >= self.max_length:
                raise PromptTooLongError(f"{len(prompt)} {self.max_length}")
            if self.waiting.qsize() >= self.max_queue:
                raise QueueFullError(f"{self.max_queue} requests wait already")
            completion = Completion(prompt, params)
            self.waiting.put(completion)
            return completion

    def stats(self):
        return {
            "requests_waiting": self.waiting.qsize(),
            "requests_running": sum(r is not None for r in self.running),
            "tokens": self.num_tokens,
            "steps": self.num_steps,
        }

    def close(self):
        with self.lock:
            if self.failure is None:
                self.failure = EngineStoppedError("closed")
        self.thread.join(10)

    def _loop(self):
        tokens = np.zeros(self.slots, np.int32)
        keys = jax.vmap(jax.random.key)(jnp.arange(self.slots))
        temperature = np.zeros(self.slots, np.float32)
        counts = [0] * self.slots
        while self.failure is None:
            for slot in range(self.slots):
                c = self.running[slot]
                if c is not None and c.cancelled:
                    c.put(Token(None, None, "cancelled"))
                    self.running[slot] = c = None
                while c is None and not self.waiting.empty():
                    c = self.waiting.get()
                    if c.cancelled:
                        c.put(Token(None, None, "cancelled"))
                        c = None
                        continue
                    self.running[slot] = c
                    tokens[slot] = c.prompt[-1]
                    keys = keys.at[slot].set(jax.random.key(c.params.seed))
                    temperature[slot] = c.params.temperature if c.params.do_sample else 0
                    counts[slot] = 0
            if not any(self.running):
                time.sleep(0.002)
                continue
            if self.fail_next:
                self.failure = EngineStoppedError("the loop failed: boom")
                break
            chosen, logprobs, keys = _step(self.table, tokens, keys, temperature)
            tokens = np.array(chosen)
            logprobs = np.array(logprobs)
            time.sleep(self.step_s)
            self.num_steps += 1
            for slot, c in enumerate(self.running):
                if c is None:
                    continue
                counts[slot] += 1
                self.num_tokens += 1
                token, reason = int(tokens[slot]), None
                if token in c.params.stop_token_ids:
                    reason = "stop"
                elif counts[slot] >= min(c.params.max_new_tokens, self.max_length - len(c.prompt)):
                    reason = "length"
                c.put(Token(token, float(logprobs[slot]), reason))
                if reason:
                    self.running[slot] = None
        for c in [*self.running, *iter(self._next_waiting, None)]:
            if c is not None:
                c.put(self.failure)
        self.running = [None] * self.slots

    def _next_waiting(self):
        return None if self.waiting.empty() else self.waiting.get()
