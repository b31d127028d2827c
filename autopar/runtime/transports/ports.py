"""Small messages between workers, for transports whose data goes another way.

A `MessagePort` accepts connections, and `dial` makes one. Both sides first prove that they know the
session's token. Messages are frames without arrays: JSON, never executed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import ClusterError, DataError, WorkerError
from autopar.runtime.remote.frames import read_frame, write_frame
from autopar.runtime.remote.sockets import GREETING_S, connect, greet_client, hang_up, listen

_TAKE_LIMIT_S = 60.0  # for the other side to accept a message
_MAX_BYTES = 2**20

Serve = Callable[[socket.socket, dict[str, Any]], None]


class MessagePort:
    """Accepts connections on `host`. Calls `serve` with each connection and its first message, on a
    new thread; closes the connection when `serve` returns."""

    def __init__(self, host: str, token: str, serve: Serve) -> None:
        self._token = token
        self._serve = serve
        self._closed = False
        self._connections: set[socket.socket] = set()
        try:
            self._listener = listen(host)
        except DataError as error:
            raise ClusterError(f"cannot open a port for transfers: {error}.") from error
        self.address = [host, self._listener.getsockname()[1]]
        threading.Thread(target=self._accept, name="autopar-port", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for connection in [self._listener, *self._connections]:
            hang_up(connection)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:  # out of file descriptors for now
                    time.sleep(0.05)
                continue
            threading.Thread(
                target=self._welcome, args=(connection,), name="autopar-port", daemon=True
            ).start()

    def _welcome(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        with connection, contextlib.suppress(DataError, OSError):
            greet_client(connection, self._token)
            first = receive(connection, time.monotonic() + GREETING_S)
            connection.settimeout(_TAKE_LIMIT_S)
            self._serve(connection, first)
        self._connections.discard(connection)


def dial(
    worker: int, address: Sequence[Any], token: str, first: dict[str, Any], limit_s: float
) -> socket.socket:
    """Connect to a worker's port and send the message `first`."""
    host, port = address
    try:
        connection = connect((host, port), token, limit_s)
        try:
            connection.settimeout(_TAKE_LIMIT_S)
            write_frame(connection, first)
        except BaseException:
            connection.close()
            raise
        return connection
    except DataError as error:
        raise WorkerError(
            f"worker {worker} does not answer at {host}:{port} ({error}): it has died, or this "
            "host cannot reach it. All ports between the cluster's hosts must be open."
        ) from error


def receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """The next message. Without a deadline (by `time.monotonic`) it waits for a message or the end
    of the connection."""
    header, _ = read_frame(connection, _MAX_BYTES, max_bytes=0, deadline=deadline)
    return header
