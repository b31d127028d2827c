"""Frames over a socket: any arrays arrive unchanged, and any other bytes are rejected."""

from __future__ import annotations

import socket
import threading
import time

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import DataError
from autopar.runtime.remote.frames import read_frame, write_frame

few = settings(deadline=None, max_examples=150)
dtypes = st.sampled_from(
    [
        *map(np.dtype, ["bool", "int8", "uint16", "int64", "float16", "float32", "complex64"]),
        np.dtype(ml_dtypes.bfloat16),
        np.dtype(ml_dtypes.float8_e4m3fn),
        np.dtype(">f4"),
    ]
)
headers = st.dictionaries(
    st.sampled_from(["kind", "key", "why"]), st.integers() | st.text() | st.none()
)


@st.composite
def arrays(draw) -> np.ndarray:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 200]), max_size=3))
    values = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, size=shape)
    array = values.astype(draw(dtypes))
    if array.ndim and draw(st.booleans()):
        array = array.T if draw(st.booleans()) else array[::2]
    return array


def received(data: bytes) -> object:
    """The result of reading these bytes and then the end of the stream."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        thread = threading.Thread(target=_send, args=(sender, data))
        thread.start()
        try:
            return read_frame(receiver, deadline=time.monotonic() + 10)
        except DataError as error:
            return error
        finally:
            receiver.close()
            thread.join()


def _send(sender: socket.socket, data: bytes) -> None:
    try:
        sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
    except OSError:  # the other side has seen enough
        pass


def frame_of(header: dict, given: list[np.ndarray]) -> bytes:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        chunks: list[bytes] = []
        thread = threading.Thread(
            target=lambda: chunks.extend(iter(lambda: receiver.recv(2**20), b""))
        )
        thread.start()
        write_frame(sender, header, given)
        sender.shutdown(socket.SHUT_WR)
        thread.join()
    return b"".join(chunks)


@few
@given(headers, st.lists(arrays(), max_size=5))
def test_what_is_written_is_read(header, given):
    got_header, got = received(frame_of(header, given))  # type: ignore[misc]
    assert {**header, "arrays": got_header["arrays"]} == got_header
    assert len(got) == len(given)
    for one, other in zip(got, given, strict=True):
        assert one.dtype == other.dtype.newbyteorder("=") and one.shape == other.shape
        assert one.flags.c_contiguous and one.flags.writeable
        np.testing.assert_array_equal(one.astype(np.complex128), other.astype(np.complex128))


@few
@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_refused(data):
    assert isinstance(received(data), DataError)
    assert isinstance(received(b"apf1" + data), DataError)


@few
@given(st.data())
def test_a_damaged_frame_is_refused_or_read_with_the_sizes_it_says(data):
    frame = bytearray(frame_of({"kind": "send", "key": 1}, [np.arange(6.0), np.ones((2, 3))]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    found = received(bytes(frame))
    if not isinstance(found, DataError):
        header, got = found  # type: ignore[misc]
        assert [[a.dtype.name, list(a.shape)] for a in got] == header["arrays"]
