"""Sockets of the data channel: from an address and the session's token to a proven connection.

Three frames are exchanged before anything else is read: the worker's challenge, the driver's hello
and the worker's welcome. Each side proves that it knows the token by a hash over the other's random
bytes, so the token is never sent, and an eavesdropper learns nothing useful.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import time
from typing import Any

from autopar.errors import DataError
from autopar.runtime.remote.frames import FrameError, PeerGone, read_frame, write_frame

GREETING_S = 10.0
_MAX_GREETING_BYTES = 1024
_KEEPALIVE_S = (10, 5, 3)  # idle, between probes, probes: notices a vanished host in 25 s


def shown(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def listen(host: str) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise DataError(f"The data channel cannot resolve the host {host!r}: {error}") from None
    try:
        listener.bind(where)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise DataError(
            f"The data channel cannot listen on {host!r}: {error}. It must be an address of this "
            "machine with a free port."
        ) from error
    return listener


def connect(address: tuple[str, int], token: str, limit_s: float) -> socket.socket:
    try:
        connection = socket.create_connection(address, timeout=limit_s)
    except OSError as error:
        raise PeerGone(
            f"No connection to the worker's data channel at {shown(address)}: {error}. Its "
            "process may have ended, or a firewall may be between the hosts."
        ) from error
    try:
        _greet_server(connection, token, limit_s)
    except DataError as error:
        connection.close()
        raise type(error)(
            f"The data channel at {shown(address)} did not accept this session: {error}."
        ) from error
    return connection


def greet_client(connection: socket.socket, token: str) -> None:
    """The worker's half of the greeting: challenge, hello, welcome."""
    write_frame(connection, challenge_client(connection, token))


def challenge_client(connection: socket.socket, token: str) -> dict[str, Any]:
    """The greeting up to the client's proof; returns the welcome, which the caller sends once it
    is ready for the client."""
    _tune(connection, GREETING_S)
    deadline = time.monotonic() + GREETING_S
    nonce = secrets.token_hex(16)
    write_frame(connection, {"kind": "challenge", "nonce": nonce})
    hello = _read_greeting(connection, "hello", deadline)
    _check_proof(hello, token, nonce)
    return {"kind": "welcome", "proof": _proof(token, "welcome", hello.get("nonce"))}


def _greet_server(connection: socket.socket, token: str, limit_s: float) -> None:
    _tune(connection, limit_s)
    deadline = time.monotonic() + limit_s
    challenge = _read_greeting(connection, "challenge", deadline)
    nonce = secrets.token_hex(16)
    proof = _proof(token, "hello", challenge.get("nonce"))
    write_frame(connection, {"kind": "hello", "proof": proof, "nonce": nonce})
    _check_proof(_read_greeting(connection, "welcome", deadline), token, nonce)


def _read_greeting(connection: socket.socket, kind: str, deadline: float) -> dict[str, Any]:
    header, _ = read_frame(connection, _MAX_GREETING_BYTES, max_bytes=0, deadline=deadline)
    if header.get("kind") != kind:
        raise FrameError(f"a {kind} was expected")
    return header


def _check_proof(header: dict[str, Any], token: str, nonce: str) -> None:
    right = _proof(token, header["kind"], nonce)
    if not hmac.compare_digest(right.encode(), str(header.get("proof")).encode()):
        raise FrameError("the other side is of another session")


def _proof(token: str, kind: str, nonce: Any) -> str:
    return hmac.new(token.encode(), f"{kind} {nonce}".encode(), hashlib.sha256).hexdigest()


def _tune(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle_s, interval_s, probes = _KEEPALIVE_S
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def hang_up(connection: socket.socket) -> None:
    """End a connection and wake the threads that wait on it, which closing alone would not do."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
