"""Clients of a completions server, in a separate process: a URL → latencies and tokens/s.

    python -m benchmarks.serving_load URL --clients 8 --seconds 20 --prompt-lengths 16,64,256

Each client sends a request, reads the stream to its end and sends the next (a closed loop), with
prompts of random token ids of mixed lengths. The first seconds are not counted. It prints one JSON
object: time to the first token, per token after it, and of whole requests, in milliseconds, and the
tokens per second of all clients together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.parse
from typing import Any

PERCENTILES = (50, 90, 99)


class Load:
    """What all clients observe between `begin` and `end`."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.begin = time.perf_counter() + args.warm_up
        self.end = self.begin + args.seconds
        self.first_s: list[float] = []
        self.token_s: list[float] = []
        self.whole_s: list[float] = []
        self.num_tokens = 0
        self.statuses: dict[str, int] = {}

    async def client(self, index: int) -> None:
        draw = random.Random(index)
        parts = urllib.parse.urlsplit(self.args.url)
        while time.perf_counter() < self.end:
            length = draw.choice(self.args.prompt_lengths)
            prompt = [draw.randrange(self.args.vocab_size) for _ in range(length)]
            fields = {
                "prompt": prompt,
                "max_tokens": self.args.max_tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            await self._ask(parts.hostname, parts.port, json.dumps(fields).encode())

    async def _ask(self, host: str | None, port: int | None, body: bytes) -> None:
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nHost: load\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = (await reader.readline()).split()[1].decode()
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status != "200":
                await asyncio.sleep(0.05)
                return
            last = None
            async for line in reader:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                num_new = len(json.loads(line[6:])["choices"][0]["token_ids"])
                self._saw(now, last, started, num_new)
                last = now
            if last is not None and self.begin <= last <= self.end:
                self.whole_s.append(last - started)
        finally:
            writer.close()

    def _saw(self, now: float, last: float | None, started: float, num_new: int) -> None:
        if not self.begin <= now <= self.end or not num_new:
            return
        self.num_tokens += num_new
        if last is None:
            self.first_s.append(now - started)
        else:
            self.token_s.extend([(now - last) / num_new] * num_new)

    def row(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "clients": self.args.clients,
            "requests": len(self.whole_s),
            "tokens_per_s": self.num_tokens / self.args.seconds,
            "statuses": self.statuses,
        }
        for name, seconds in (
            ("first_token", self.first_s),
            ("per_token", self.token_s),
            ("whole", self.whole_s),
        ):
            figures[f"{name}_ms"] = {
                f"p{percent}": _percentile_ms(seconds, percent) for percent in PERCENTILES
            }
        return figures


def _percentile_ms(seconds: list[float], percent: float) -> float | None:
    """None without samples."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    load = Load(args)
    tasks = [asyncio.create_task(load.client(index)) for index in range(args.clients)]
    await asyncio.wait(tasks, timeout=args.warm_up + args.seconds + args.grace)
    failures = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {**load.row(), "failures": [str(error) for error in failures if error]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Clients of a completions server.")
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=2.0)
    parser.add_argument("--grace", type=float, default=10.0, help="for requests at the end")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument(
        "--prompt-lengths", type=lambda s: [int(n) for n in s.split(",")], default=[16, 64, 256]
    )
    json.dump(asyncio.run(_run(parser.parse_args())), sys.stdout)
    print(flush=True)


if __name__ == "__main__":
    main()
