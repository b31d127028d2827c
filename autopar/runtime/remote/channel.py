"""The data channel: batches from the driver to a worker process, and fetched values back.

A worker has a `ChannelServer`, the driver a `ChannelClient` per worker. Both know the session's
token and first prove it to each other (`sockets.py`), so a stranger on either end is noticed at
once. Data is sent under a *key*, a number that driver and worker agree on by other means; data that
comes twice under one key is kept in order.

The client has two connections, so that it can fetch a value while it sends a large batch.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar.errors import DataError
from autopar.runtime.remote.frames import (
    DataTimeout,
    FrameError,
    PeerGone,
    read_frame,
    write_frame,
)
from autopar.runtime.remote.sockets import (
    GREETING_S,
    challenge_client,
    connect,
    hang_up,
    listen,
    shown,
)
from autopar.runtime.uninterrupted import uninterrupted


class ChannelServer:
    """A worker's end: accepts connections on `host`, and reads what is sent, on threads of its own.

    limit_s: a client that accepts no data for this long is dropped.
    """

    def __init__(self, host: str, token: str, *, limit_s: float = 60.0) -> None:
        self._token = token
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._inbox: dict[int, deque[list[np.ndarray]]] = {}
        self._outbox: dict[int, deque[Sequence[Any]]] = {}
        self._connections: set[socket.socket] = set()
        self._proven: set[socket.socket] = set()
        self._gone = ""  # why no client is connected any more
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._listener = listen(host)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._start(self._accept)

    def take(self, key: int, limit_s: float) -> list[np.ndarray]:
        """The arrays that a client sent under `key`; waits for them. Raises `PeerGone` if all
        clients have left without sending them."""
        with self._changed:
            come = self._changed.wait_for(
                lambda: key in self._inbox or self._gone or self._closed, limit_s
            )
            if key in self._inbox:
                return _pop(self._inbox, key)
        if self._closed:
            raise PeerGone(f"Data of key {key}: this end of the data channel is closed.")
        if come:
            raise PeerGone(f"Data of key {key} will not come: {self._gone}.")
        raise DataTimeout(
            f"Data of key {key} did not come from the driver within {limit_s:g} s. The driver may "
            "be busy or stopped, or the network may be slow."
        )

    def has(self, key: int) -> bool:
        """Whether a client has sent something under `key` that nobody took."""
        with self._changed:
            return key in self._inbox

    def offer(self, key: int, arrays: Sequence[Any]) -> None:
        """Keep arrays until a client receives them; does not wait."""
        with self._changed:
            self._outbox.setdefault(key, deque()).append(tuple(arrays))
            self._changed.notify_all()

    def close(self) -> None:
        """End all connections; threads that wait get an error."""
        with self._changed:
            self._closed = True
            open_ones = [*self._connections, self._listener]
            self._changed.notify_all()
        for connection in open_ones:
            hang_up(connection)
        self._listener.close()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(GREETING_S)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="autopar-channel", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors for a while
                if not self._closed:
                    time.sleep(0.05)
                continue
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        why = "the driver closed the connection"
        asked: deque[int] = deque()
        done = threading.Event()
        writer = threading.Thread(
            target=self._give, args=(connection, asked, done), name="autopar-channel", daemon=True
        )
        try:
            welcome = challenge_client(connection, self._token)
            with self._changed:  # before the client knows that it is connected
                self._proven.add(connection)
                self._gone = ""
            write_frame(connection, welcome)
            connection.settimeout(self._limit_s)
            while True:
                header, arrays = read_frame(connection)
                kind, key = header.get("kind"), header.get("key")
                if type(key) is not int:
                    raise FrameError("a frame without a key")
                with self._changed:
                    if kind == "send":
                        self._inbox.setdefault(key, deque()).append(arrays)
                    elif kind == "ask":
                        asked.append(key)
                    else:
                        raise FrameError("a frame of unknown kind")
                    self._changed.notify_all()
                if kind == "ask" and writer.ident is None:
                    writer.start()
        except (DataError, OSError) as error:
            why = f"the driver's connection ended ({error})"
        finally:
            done.set()
            hang_up(connection)
            with self._changed:
                self._changed.notify_all()
            if writer.ident is not None:
                writer.join(GREETING_S)
            connection.close()
            with self._changed:
                self._connections.discard(connection)
                if connection in self._proven:
                    self._proven.discard(connection)
                    self._gone = "" if self._proven else why
                self._changed.notify_all()

    def _give(self, connection: socket.socket, asked: deque[int], done: threading.Event) -> None:
        """Send what was requested, as it is offered."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: done.is_set() or any(key in self._outbox for key in asked)
                )
                if done.is_set():
                    return
                key = next(key for key in asked if key in self._outbox)
                asked.remove(key)
                arrays = _pop(self._outbox, key)
            try:
                write_frame(connection, {"kind": "give", "key": key}, arrays)
            except DataError as error:
                if type(error) is not DataError:  # the connection is useless now
                    hang_up(connection)
                    return
                write_frame(connection, {"kind": "refuse", "key": key, "why": str(error)})


class ChannelClient:
    """The driver's end for one worker. Any thread may call any method.

    limit_s: for connecting, and for how long the worker may accept no data.
    """

    def __init__(self, address: tuple[str, int], token: str, limit_s: float) -> None:
        self.address = address
        self._changed = threading.Condition()
        self._asked: set[int] = set()
        self._unwanted: set[int] = set()
        self._come: dict[int, list[np.ndarray] | str] = {}
        self._broken = ""
        self._sending, self._asking = threading.Lock(), threading.Lock()
        self._up = connect(address, token, limit_s)
        try:
            self._down = connect(address, token, limit_s)
        except BaseException:
            self._up.close()
            raise
        self._reader = threading.Thread(target=self._read, name="autopar-channel", daemon=True)
        self._reader.start()

    def send(self, key: int, arrays: Sequence[Any]) -> None:
        """Send arrays under `key`; returns when the kernel has all of them. Arrays that are not
        contiguous are copied first."""
        self._write(self._sending, self._up, {"kind": "send", "key": key}, arrays)

    def receive(self, key: int, limit_s: float) -> list[np.ndarray]:
        """The arrays that the worker offers under `key`; waits for them. After a `DataTimeout` it
        can be called again and finds what has come meanwhile."""
        with self._changed:
            ask = key not in self._asked and key not in self._come
            if ask:
                self._asked.add(key)
        if ask:
            self._write(self._asking, self._down, {"kind": "ask", "key": key}, ())
        with self._changed:
            self._changed.wait_for(lambda: key in self._come or self._broken, limit_s)
            if key in self._come:
                come = self._come.pop(key)
            elif self._broken:
                raise PeerGone(self._message(f"value of key {key}"))
            else:
                raise DataTimeout(
                    f"The worker at {shown(self.address)} did not give the value of key {key} "
                    f"within {limit_s:g} s. It may still be computing: give it more time, or look "
                    "at its log."
                )
        if isinstance(come, str):
            raise DataError(f"The worker at {shown(self.address)} cannot send a value: {come}")
        return come

    def discard(self, key: int) -> None:
        """Nobody will receive the value of `key`: the worker need not keep it. Does not wait."""
        with self._changed:
            if self._come.pop(key, None) is not None:
                return
            self._unwanted.add(key)
            ask = key not in self._asked
            self._asked.add(key)
        if ask:
            self._write(self._asking, self._down, {"kind": "ask", "key": key}, ())

    def close(self) -> None:
        """End the connections; threads that wait get an error."""
        self._break("it was closed here")
        if self._reader is not threading.current_thread():
            self._reader.join(GREETING_S)
        for lock, connection in ((self._sending, self._up), (self._asking, self._down)):
            with lock:
                connection.close()

    def _write(
        self, lock: threading.Lock, connection: socket.socket, header: Any, arrays: Sequence[Any]
    ) -> None:
        with uninterrupted(), lock:
            if self._broken:
                raise PeerGone(self._message(f"data of key {header['key']}"))
            try:
                write_frame(connection, header, arrays)
            except (PeerGone, DataTimeout) as error:
                self._break(str(error))
                raise type(error)(self._message(f"data of key {header['key']}")) from error
            except DataError:
                raise  # refused before anything was sent
            except BaseException as error:  # Ctrl-C came twice: half a frame may have been sent
                self._break(f"sending was cut: {error!r}")
                raise

    def _read(self) -> None:
        try:
            while True:
                header, arrays = read_frame(self._down)
                kind, key = header.get("kind"), header.get("key")
                if kind not in ("give", "refuse") or type(key) is not int:
                    raise FrameError("a frame of unknown kind")
                with self._changed:
                    self._asked.discard(key)
                    if key in self._unwanted:
                        self._unwanted.discard(key)
                        continue
                    self._come[key] = arrays if kind == "give" else str(header.get("why"))
                    self._changed.notify_all()
        except (DataError, OSError) as error:
            self._break(str(error))

    def _break(self, why: str) -> None:
        with self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()
        hang_up(self._up)
        hang_up(self._down)

    def _message(self, what: str) -> str:
        return (
            f"The data channel to the worker at {shown(self.address)} is lost ({what}): "
            f"{self._broken}. The worker's process may have ended; its log says why."
        )


def _pop(box: dict[int, deque[Any]], key: int) -> Any:
    waiting = box[key]
    first = waiting.popleft()
    if not waiting:
        del box[key]
    return first
