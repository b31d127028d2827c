from __future__ import annotations

import socket
import threading
import time

import pytest

from autopar.errors import DataError, WorkerError
from autopar.runtime.remote.frames import write_frame
from autopar.runtime.transports.ports import MessagePort, dial, receive


@pytest.fixture
def echo():
    """A port that answers with what it is told."""

    def serve(connection, hello):
        write_frame(connection, {"heard": hello["word"]})

    port = MessagePort("127.0.0.1", "the token", serve)
    yield port
    port.close()


def test_whoever_knows_the_token_is_served(echo):
    for word in ("one", "two"):
        with dial(1, echo.address, "the token", {"word": word}, 5) as connection:
            assert receive(connection, time.monotonic() + 5)["heard"] == word


def test_whoever_does_not_is_refused(echo):
    with pytest.raises(WorkerError, match=r"worker 1 does not answer .*did not accept"):
        dial(1, echo.address, "another token", {"word": "one"}, 5)


def test_one_that_only_pretends_is_not_served(echo):
    """It sends its message without having proved anything."""
    with socket.create_connection(tuple(echo.address), timeout=5) as connection:
        receive(connection, time.monotonic() + 5)
        write_frame(connection, {"kind": "hello", "proof": "0" * 64, "nonce": "mine"})
        with pytest.raises(DataError):
            write_frame(connection, {"word": "one"})
            receive(connection, time.monotonic() + 5)


def test_a_port_that_is_silent_is_given_up():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(WorkerError, match="worker 4 does not answer"),
    ):
        dial(4, ["127.0.0.1", silent.getsockname()[1]], "the token", {}, 1)


def test_closing_ends_those_who_wait():
    began = threading.Event()

    def serve(connection, hello):
        began.set()
        receive(connection)

    port = MessagePort("127.0.0.1", "the token", serve)
    with dial(1, port.address, "the token", {}, 5) as connection:
        assert began.wait(5)
        port.close()
        with pytest.raises(DataError):
            receive(connection, time.monotonic() + 5)
