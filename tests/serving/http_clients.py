"""Clients for the tests of the HTTP server, on plain sockets and on the standard library."""

import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 120.0


def address(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    return parts.hostname or "", parts.port or 0


def call(
    url: str, method: str, path: str, body: bytes | None = None, headers: dict | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*address(url), timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def complete(url: str, **fields: Any) -> tuple[int, Any]:
    status, _, body = call(url, "POST", "/v1/completions", json.dumps(fields).encode())
    return status, json.loads(body)


def answer(url: str, **fields: Any) -> dict[str, Any]:
    status, body = complete(url, **fields)
    assert status == 200, body
    return body


def open_stream(url: str, **fields: Any) -> socket.socket:
    """A socket on which a stream was asked for; nothing is read yet."""
    body = json.dumps({**fields, "stream": True}).encode()
    connection = socket.create_connection(address(url), timeout=TIMEOUT_S)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def events(url: str, **fields: Any) -> Iterator[Any]:
    """What a stream says, event by event, `[DONE]` as None."""
    connection = http.client.HTTPConnection(*address(url), timeout=TIMEOUT_S)
    try:
        body = json.dumps({**fields, "stream": True}).encode()
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["Content-Type"] == "text/event-stream"
        for line in response:
            if line.strip():
                assert line.startswith(b"data: "), line
                data = line[len(b"data: ") :].strip()
                yield None if data == b"[DONE]" else json.loads(data)
    finally:
        connection.close()


def raw(url: str, data: bytes, *, half_close: bool = False) -> bytes:
    """What comes back on a socket for these bytes, until the server closes or falls silent."""
    with socket.create_connection(address(url), timeout=3.0) as connection:
        received = b""
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
        except (TimeoutError, ConnectionError):
            pass
        return received


def wait_until(condition: Any, what: str, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)
