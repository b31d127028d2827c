"""Serving against a hand-written decode loop, and its latencies over HTTP, on one device.

    python -m benchmarks.serving --json FILE [--only MODEL …] [--batches N …] [--limit-s 540]
    python -m benchmarks.serving --tiny --json FILE     (small models, on any device)

Rows of kind `decode`: tokens per second of the engine of `examples/llm_serving`, all slots in use,
over those of `benchmarks/serving_loop.py` with the same weights, batch and cache. Both alternate,
round by round; `ratio` is the median over rounds of the engine's best variant over the loop's best.
The engine hands out every token as it comes; the loop returns all of them at the end.
`same_tokens` is the share of sequences whose first tokens agree; in bfloat16 another order of sums
may choose another token.

Rows of kind `http`, for one model: 1, 8 and 64 clients in a separate process
(`benchmarks/serving_load.py`), each sending its next request when the previous answer is complete.

Every model runs in its own process. Rows are written as they come; a row already in the file is not
measured again; models that have not begun when the time is up are left out.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.script import check_names, command_line, script_parser, write_json
from benchmarks.serving_cases import MODELS, TINY_MODELS, TINY_SIZES, Sizes

STEPS_PER_CALL = (1, 8)
SCAN_TOKENS = 32
NUM_COMPARED = 16  # first tokens of each sequence
WAIT_S = 600.0


class Decode:
    """The engine and the loop for one model and batch."""

    def __init__(self, config: Any, sizes: Sizes, batch: int, steps_per_call: tuple[int, ...]):
        import jax
        import jax.numpy as jnp
        import numpy as np

        import autopar
        from benchmarks import serving_loop
        from examples.llm_serving.engine import BatchingEngine
        from examples.llm_serving.steps import Steps
        from examples.llm_serving.weights import random_params

        self.sizes, self.batch = sizes, batch
        dtype = jnp.dtype(config.dtype)
        self.steps = Steps(
            config,
            num_slots=batch,
            length=sizes.length,
            dtype=dtype,
            method=autopar.ShardParallel(mesh_shape=(1,)),
        )
        self.params = random_params(config, dtype, self.steps.param_shardings())
        self.engines = {
            num: BatchingEngine(self.steps, self.params, steps_per_call=num)
            for num in steps_per_call
        }
        fused = serving_loop.fuse_parameters(config, self.params)
        self.loops = {
            "call": serving_loop.Loop(config, fused, 1),
            "scan": serving_loop.Loop(config, fused, SCAN_TOKENS),
        }
        shape = (batch, sizes.prompt)
        self.prompts = np.random.default_rng(0).integers(0, config.vocab_size, shape)
        tokens = jnp.asarray(self.prompts, jnp.int32)
        cache = serving_loop.make_cache(config, batch, sizes.length, dtype)
        self._cache = self.loops["call"].fill(cache, tokens)
        self._last = tokens[:, -1]
        jax.block_until_ready(self._cache)

    def engine_round(self, steps_per_call: int, num_tokens: int) -> tuple[float, list[list[int]]]:
        """Tokens per second while all slots decode, and the tokens."""
        from examples.llm_serving.requests import SamplingParams

        params = SamplingParams(max_new_tokens=num_tokens)
        times: list[list[float]] = [[] for _ in range(self.batch)]
        running, is_over = set(range(self.batch)), threading.Event()

        def note(index: int) -> None:
            times[index].append(time.perf_counter())
            if len(times[index]) == num_tokens:
                running.discard(index)
                if not running:
                    is_over.set()

        completions = []
        for index, prompt in enumerate(self.prompts.tolist()):
            completion = self.engines[steps_per_call].submit(prompt, params)
            completion.listen(functools.partial(note, index))
            completions.append(completion)
        # Tokens are read at the end, as for the loop. The listener misses tokens that came before
        # `listen`; then the engine's statistics say when it is idle.
        while not is_over.wait(0.25):
            stats = self.engines[steps_per_call].stats()
            if not stats["requests_waiting"] + stats["requests_running"]:
                break
        tokens = [[one.token_id for one in each.tokens(WAIT_S)] for each in completions]
        # Timed from the end of the first call, since the tokens of a call come at once.
        begin = max(stamps[steps_per_call] for stamps in times)
        end = min(stamps[-1] for stamps in times)
        count = sum(begin < at <= end for stamps in times for at in stamps)
        return count / (end - begin), tokens

    def loop_round(self, name: str, num_tokens: int) -> tuple[float, list[list[int]]]:
        """The same for the loop."""
        import numpy as np

        started = time.perf_counter()
        start = self.sizes.prompt - 1
        self._cache, outs = self.loops[name].run(self._cache, self._last, start, num_tokens)
        seconds = time.perf_counter() - started
        tokens = np.concatenate([np.asarray(out).reshape(-1, self.batch) for out in outs])
        return self.batch * num_tokens / seconds, tokens.T.tolist()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def measure_decode(decode: Decode) -> dict[str, Any]:
    from autopar.runtime.timing import spread_of

    num_tokens = decode.sizes.new_tokens
    ways: dict[str, Any] = {}
    for num in decode.engines:
        ways[f"engine_{num}"] = lambda num=num: decode.engine_round(num, num_tokens)
    for name in decode.loops:
        ways[f"loop_{name}"] = lambda name=name: decode.loop_round(name, num_tokens)
    first_s, tokens = {}, {}
    for name, run in ways.items():  # compiles, and returns the tokens to compare
        started = time.perf_counter()
        _, tokens[name] = run()
        first_s[name] = time.perf_counter() - started
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(decode.sizes.rounds):
        for name in list(ways) if index % 2 else list(ways)[::-1]:
            rates[name].append(ways[name]()[0])
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    engine = max((name for name in ways if name.startswith("engine")), key=medians.__getitem__)
    loop = max((name for name in ways if name.startswith("loop")), key=medians.__getitem__)
    ratios = [a / b for a, b in zip(rates[engine], rates[loop], strict=True)]
    pairs = list(zip(tokens["loop_call"], tokens["engine_1"], strict=True))
    same = sum(a[:NUM_COMPARED] == b[:NUM_COMPARED] for a, b in pairs)
    return {
        "ratio": statistics.median(ratios),
        "ratio_spread": spread_of(ratios),
        "engine": engine,
        "loop": loop,
        "tokens_per_s": medians,
        "spreads": {name: spread_of(samples) for name, samples in rates.items()},
        "first_round_s": first_s,
        "same_tokens": same / len(pairs),
    }


def measure_http(engine: Any, sizes: Sizes, num_clients: int) -> dict[str, Any]:
    """Runs a server on `engine` in this process and the clients in another."""
    from examples.llm_serving.running import SWITCH_S, serving
    from examples.llm_serving.server import Server

    sys.setswitchinterval(SWITCH_S)
    lengths = ",".join(str(length) for length in sizes.prompt_lengths)
    with serving(Server(engine)) as url:
        command = [sys.executable, "-m", "benchmarks.serving_load", url]
        command += ["--clients", str(num_clients), "--seconds", str(sizes.seconds)]
        command += ["--prompt-lengths", lengths, "--max-tokens", str(sizes.answer)]
        command += ["--vocab-size", str(engine.vocab_size)]
        limit_s = sizes.seconds + 60
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    return json.loads(done.stdout)


def warm_up(engine: Any, sizes: Sizes) -> None:
    """Compiles prefill for every prompt length that clients send."""
    from examples.llm_serving.requests import SamplingParams

    for length in sizes.prompt_lengths:
        list(engine.submit([1] * length, SamplingParams(max_new_tokens=9)).tokens(WAIT_S))


def run_model(name: str, options: argparse.Namespace) -> None:
    """Runs in its own process: prints the machine, then rows, as lines of JSON."""
    import jax

    import autopar
    from benchmarks.pipeline_rows import machine
    from examples.llm_serving.config import config_from_dict

    device = jax.devices()[0]
    autopar.init(devices=[device])
    print(json.dumps({**machine(), "device": device.device_kind}), flush=True)
    sizes, models = (TINY_SIZES, TINY_MODELS) if options.tiny else (Sizes(), MODELS)
    config = config_from_dict(models[name])
    done = set(options.done)
    for batch in options.batches or sizes.batches:
        labels = [f"{name}, batch {batch}"]
        if batch == sizes.batches[-1] and name == options.http:
            labels += [f"{name}, {num} clients" for num in sizes.clients]
        if done.issuperset(labels):
            continue
        started = time.perf_counter()
        decode = Decode(config, sizes, batch, tuple(options.steps_per_call))
        made_s = time.perf_counter() - started
        common = {"model": name, "slots": batch}
        if labels[0] not in done:
            row = {**common, **measure_decode(decode), "made_s": made_s}
            print(json.dumps({"label": labels[0], "kind": "decode", **row}), flush=True)
        engine = decode.engines[1]
        if len(labels) > 1:
            warm_up(engine, sizes)
        for label, num_clients in zip(labels[1:], sizes.clients, strict=False):
            if label not in done:
                row = {**common, **measure_http(engine, sizes, num_clients)}
                print(json.dumps({"label": label, "kind": "http", **row}), flush=True)
        decode.close()
        del decode, engine
        gc.collect()
        jax.clear_caches()


def show(row: dict[str, Any]) -> None:
    if row["kind"] == "decode":
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row["tokens_per_s"].items())
        print(
            f"{row['label']:28s} ratio {row['ratio']:.3f} ± {row['ratio_spread']:.1%} "
            f"({row['engine']} over {row['loop']}); tokens/s: {rates}; "
            f"same tokens {row['same_tokens']:.0%}",
            flush=True,
        )
        return
    parts = [
        f"{name.removesuffix('_ms')} "
        + " / ".join("none" if ms is None else f"{ms:.1f}" for ms in row[name].values())
        for name in ("first_token_ms", "per_token_ms", "whole_ms")
    ]
    print(
        f"{row['label']:28s} {row['tokens_per_s']:.0f} tokens/s, {row['requests']} requests; "
        f"p50 / p90 / p99 in ms: {'; '.join(parts)}; {row['statuses']}",
        flush=True,
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="these models, in this order")
    parser.add_argument("--limit-s", type=float, default=540.0, help="stop after that many seconds")
    parser.add_argument("--steps-per-call", type=int, nargs="+", default=list(STEPS_PER_CALL))
    parser.add_argument("--batches", type=int, nargs="+", help="only these; default: 1 8 64")
    parser.add_argument(
        "--http", metavar="MODEL", help="model for the HTTP clients; 'none' for none"
    )
    parser.add_argument("--tiny", action="store_true", help="small models, on any device")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.json is None:
        parser.error("--json is required: rows are written there, and read by the next run")
    if options.steps_per_call[0] != 1:
        parser.error("--steps-per-call: the first must be 1, which the HTTP rows use")
    options.http = options.http or ("opt-tiny" if options.tiny else "opt-1.3b")
    if options.model:
        run_model(options.model, options)
        return
    from benchmarks.one_gpu import rows_of

    models = TINY_MODELS if options.tiny else MODELS
    wanted = options.only or list(models)
    check_names(parser, "--only", wanted, models)
    path = pathlib.Path(options.json)
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows: list[dict[str, Any]] = document.pop("rows")
    document["command"] = command_line("benchmarks.serving", FILE=options.json)
    ends_s = time.time() + options.limit_s
    for model in wanted:
        command = [sys.executable, "-m", "benchmarks.serving", "--json", options.json]
        command += ["--model", model, "--http", options.http] + ["--tiny"] * options.tiny
        command += ["--batches", *map(str, options.batches)] if options.batches else []
        command += ["--steps-per-call", *map(str, options.steps_per_call)]
        command += ["--done", *(row["label"] for row in rows)]
        for row in rows_of(model, command, ends_s, document):
            rows.append(row)
            show(row)
            write_json(options.json, {**document, "rows": rows})


if __name__ == "__main__":
    main()
