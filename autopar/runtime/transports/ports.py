"""Small messages between workers, for transports whose data goes another way: a `Port` accepts
connections, `dial` makes one.

Both sides prove that they know the session's token, by a hash over the other's random bytes, before
anything else is read. Messages are frames without arrays: JSON, nothing that is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import ClusterError, DataError, WorkerError
from autopar.runtime.remote.frames import FrameError, read_frame, write_frame

HANDSHAKE_S = 10.0
_POLL_S = 1.0  # how often a handshake looks at the clock
_TAKE_LIMIT_S = 60.0  # for the other side to take a message
_MAX_BYTES = 2**20

Serve = Callable[[socket.socket, dict[str, Any]], None]


class Port:
    """Accepts connections on `host`. `serve` gets each of them, with what the other side said of
    itself, on a thread of its own; the connection is closed when it returns."""

    def __init__(self, host: str, token: str, serve: Serve) -> None:
        self._token = token
        self._serve = serve
        self._closed = False
        self._connections: set[socket.socket] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ClusterError(
                f"no port could be opened at the address {host}: {error}. It must be an address of "
                "this host which the other hosts can reach"
            ) from error
        self.address = [host, self._listener.getsockname()[1]]
        threading.Thread(target=self._accept, name="autopar-port", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for connection in [self._listener, *self._connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:  # out of file descriptors for a while
                    time.sleep(0.05)
                continue
            threading.Thread(
                target=self._welcome, args=(connection,), name="autopar-port", daemon=True
            ).start()

    def _welcome(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        with connection, contextlib.suppress(DataError, OSError):
            deadline = _set_up(connection, HANDSHAKE_S)
            own = secrets.token_hex(32)
            asked = receive(connection, deadline)
            write_frame(
                connection,
                {"nonce": own, "proof": _proof(self._token, "accepts", asked["nonce"])},
            )
            hello = receive(connection, deadline)
            if hmac.compare_digest(str(hello.get("proof")), _proof(self._token, "dials", own)):
                connection.settimeout(_TAKE_LIMIT_S)
                self._serve(connection, hello)
        self._connections.discard(connection)


def dial(
    worker: int, address: Sequence[Any], token: str, hello: dict[str, Any], limit_s: float
) -> socket.socket:
    """A connection to a worker's port, which is told `hello`."""
    host, port = address
    connection = None
    try:
        connection = socket.create_connection((host, port), timeout=min(HANDSHAKE_S, limit_s))
        deadline = _set_up(connection, limit_s)
        own = secrets.token_hex(32)
        write_frame(connection, {"nonce": own})
        answer = receive(connection, deadline)
        if not hmac.compare_digest(str(answer.get("proof")), _proof(token, "accepts", own)):
            raise FrameError("it does not know this session's token")
        write_frame(connection, {**hello, "proof": _proof(token, "dials", answer["nonce"])})
        connection.settimeout(_TAKE_LIMIT_S)
        return connection
    except (OSError, DataError) as error:
        if connection is not None:
            connection.close()
        raise WorkerError(
            f"worker {worker} does not answer at {host}:{port} ({error}); it has died, or this "
            "host cannot reach it: all ports between the cluster's hosts must be open"
        ) from error


def receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """The next message. Without a deadline (of `time.monotonic`) it waits until there is one or
    the connection ends."""
    header, _ = read_frame(connection, _MAX_BYTES, max_bytes=0, deadline=deadline)
    return header


def _set_up(connection: socket.socket, limit_s: float) -> float:
    """The deadline of a handshake."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.settimeout(_POLL_S)
    return time.monotonic() + limit_s


def _proof(token: str, role: str, nonce: Any) -> str:
    return hmac.new(token.encode(), f"{role} {nonce}".encode(), hashlib.sha256).hexdigest()
