"""Runs a `Server`: in this process until SIGTERM or SIGINT, or in a thread.

On the first signal the server accepts nothing more, running requests get `Limits.drain_s` to end,
and the engine is closed. A second signal stops at once, and so does a failure of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from examples.llm_serving.server import Server

CLOSE_S = 30.0
LOOK_S = 0.5  # how often the engine's health is looked at
# The engine's thread and the event loop share the interpreter. By default, a loop with many streams
# to write would make the engine wait 5 ms, longer than a decode step.
SWITCH_S = 5e-4


def serve(server: Server, host: str, port: int, announce: Callable[[int], None]) -> bool:
    """Serves until a signal, or until the engine fails; `announce` is called with the port. Returns
    whether the engine worked to the end and closed within its limit."""
    sys.setswitchinterval(SWITCH_S)
    asyncio.run(_serve_until_signal(server, host, port, announce))
    if (failure := server.engine.failure) is not None:
        print(f"error: {failure}", file=sys.stderr)
        return False
    closing = threading.Thread(target=server.engine.close, daemon=True)
    closing.start()
    closing.join(CLOSE_S)
    return not closing.is_alive()


async def _serve_until_signal(
    server: Server, host: str, port: int, announce: Callable[[int], None]
) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            server.hurry()
        stopping.set()

    port = await server.start(host, port)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    announce(port)
    while not stopping.is_set() and server.engine.failure is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), LOOK_S)
    if server.engine.failure is not None:  # whoever started the process should start another
        server.hurry()
    await server.stop()


@contextlib.contextmanager
def serving(server: Server, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """A server in a thread, for notebooks and tests: `with serving(Server(engine)) as url`. The
    engine is left open."""
    ready: threading.Event = threading.Event()
    state: dict[str, object] = {}

    async def run() -> None:
        stop = asyncio.Event()
        try:
            state["port"] = await server.start(host, port)
        except OSError as error:
            state["error"] = error
            return
        finally:
            state["stop"] = stop.set
            state["loop"] = asyncio.get_running_loop()
            ready.set()
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="http", daemon=True)
    thread.start()
    ready.wait(CLOSE_S)
    if isinstance(error := state.get("error"), OSError):
        thread.join(CLOSE_S)
        raise error
    try:
        yield f"http://{host}:{state['port']}"
    finally:
        loop, stop = state["loop"], state["stop"]
        assert isinstance(loop, asyncio.AbstractEventLoop) and callable(stop)
        loop.call_soon_threadsafe(stop)
        thread.join(server.limits.drain_s + CLOSE_S)
