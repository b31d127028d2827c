"""Which processes are alive: connections of all processes to process 0 → the one that was lost.

Every process holds a connection to process 0 and sends a sign of life over it, and process 0
answers. A connection that ends without a farewell, or is silent for too long, is a process that was
killed, has crashed, or cannot be reached. Process 0 tells all others through the store of JAX's
coordination service (`failures.py`); that process 0 itself is lost, each process sees by itself.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import DataError
from autopar.runtime.remote.frames import FrameError, read_frame, write_frame
from autopar.runtime.remote.sockets import connect, greet_client, hang_up, listen

BEAT_S = 2.0
SILENCE_LIMIT_S = 30.0
_MAX_BEAT_BYTES = 4096
_MAX_WORDS = 1000


@dataclass(frozen=True)
class Lost:
    """A process that is gone. `doing`: what it did by its last sign of life; `silent_s`: for how
    long it was silent, or None if its connection ended."""

    process: int
    doing: str
    silent_s: float | None

    def __str__(self) -> str:
        if self.silent_s is None:
            what = "died: its process has ended by a signal or a crash, without saying why."
        else:
            what = f"has not answered for {self.silent_s:.0f} s."
        last = f" By its last sign of life it was at: {self.doing}." if self.doing else ""
        return f"Process {self.process} {what}{last}"


class _Peer:
    """A connection to one other process: beats go out and come in until one side leaves."""

    def __init__(
        self,
        process: int,
        connection: socket.socket,
        own_words: Callable[[], str],
        on_lost: Callable[[Lost], None],
        silence_limit_s: float,
    ) -> None:
        self.process = process
        self._connection = connection
        self._own_words = own_words
        self._on_lost = on_lost
        self._silence_limit_s = silence_limit_s
        self._doing = ""
        self._leaving = threading.Event()
        connection.settimeout(silence_limit_s)
        self._threads = [
            threading.Thread(target=target, name="autopar-liveness", daemon=True)
            for target in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Say farewell, so that the end of this process is no loss."""
        self._leaving.set()
        self._threads[0].join(BEAT_S)

    def _send(self) -> None:
        with contextlib.suppress(DataError, OSError):  # the reader notices
            while True:
                is_last = self._leaving.is_set()
                kind = "leave" if is_last else "beat"
                words = self._own_words()[:_MAX_WORDS]
                write_frame(self._connection, {"kind": kind, "doing": words})
                if is_last:
                    return
                self._leaving.wait(BEAT_S)

    def _receive(self) -> None:
        silent_s: float | None = None
        heard_s = time.monotonic()
        while True:
            try:
                deadline = time.monotonic() + self._silence_limit_s
                header, _ = read_frame(
                    self._connection, _MAX_BEAT_BYTES, max_bytes=0, deadline=deadline
                )
            except (DataError, OSError) as error:
                if isinstance(error, TimeoutError):
                    silent_s = time.monotonic() - heard_s
                break
            heard_s = time.monotonic()
            self._doing = str(header.get("doing", ""))
            if header.get("kind") == "leave":
                return
        if not self._leaving.is_set():
            self._on_lost(Lost(self.process, self._doing, silent_s))

    def close(self) -> None:
        self._leaving.set()
        hang_up(self._connection)
        self._connection.close()


class ProcessLiveness:
    """The connections of this process. `on_lost` is called, on another thread, when a process is
    lost: in process 0 for any other one, elsewhere for process 0.

    own_words: what this process is doing, for the others' errors.
    """

    def __init__(
        self,
        process: int,
        token: str,
        own_words: Callable[[], str],
        on_lost: Callable[[Lost], None],
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._process = process
        self._token = token
        self._make = lambda number, connection: _Peer(
            number, connection, own_words, on_lost, silence_limit_s
        )
        self._peers: list[_Peer] = []
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None

    def serve(self, host: str) -> tuple[str, int]:
        """In process 0: accept the others; returns the address at which."""
        self._listener = listen(host)
        threading.Thread(target=self._accept, name="autopar-liveness", daemon=True).start()
        return host, self._listener.getsockname()[1]

    def join(self, address: tuple[str, int], limit_s: float) -> None:
        """In any other process: connect to process 0."""
        connection = connect(address, self._token, limit_s)
        write_frame(connection, {"kind": "hello", "process": self._process})
        with self._lock:
            self._peers.append(self._make(0, connection))

    def close(self) -> None:
        with self._lock:
            peers, self._peers = self._peers, []
        if self._listener is not None:
            hang_up(self._listener)
            self._listener.close()
        for peer in peers:
            peer.leave()
        for peer in peers:
            peer.close()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._welcome, args=(connection,), name="autopar-liveness", daemon=True
            ).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            greet_client(connection, self._token)
            header, _ = read_frame(
                connection,
                _MAX_BEAT_BYTES,
                max_bytes=0,
                deadline=time.monotonic() + SILENCE_LIMIT_S,
            )
            process = header.get("process")
            if header.get("kind") != "hello" or type(process) is not int:
                raise FrameError("a hello was expected")
        except (DataError, OSError):
            connection.close()  # a stranger
            return
        with self._lock:
            self._peers.append(self._make(process, connection))
