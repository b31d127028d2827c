"""Arrays over a stream socket: from a header and arrays to bytes, and back.

A frame is a fixed prefix (magic, length of the header, bytes of arrays), a JSON header, and the
arrays' bytes one after another. Nothing that arrives is executed: a header is checked field by
field before memory is allocated for what it announces. Large arrays are sent from their own memory
and read straight into new arrays; small ones share a system call.
"""

from __future__ import annotations

import functools
import json
import math
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from autopar.errors import DataError, shortened

MAX_HEADER_BYTES = 16 * 2**20
_MAGIC = b"apf1"
_PREFIX = struct.Struct("<4sIQ")
_MAX_RANK = 64
_NUMBER_KINDS = "biufcV"  # V: those of ml_dtypes
_SMALL_BYTES = 32 * 2**10  # arrays up to this size are joined before they are sent
_BUFFERS_PER_CALL = 512  # the kernel takes 1024 at a time
_ALIGNMENT = 64  # XLA needs it to use a host array without a copy


class FrameError(DataError):
    """Bytes that are not a frame of ours. The connection is useless afterwards."""


class PeerGone(DataError, ConnectionError):
    """The other side closed the connection, or its process ended."""


class DataTimeout(DataError, TimeoutError):
    """Data did not come, or was not accepted, within its limit."""


def write_frame(
    connection: socket.socket, header: dict[str, Any], arrays: Sequence[Any] = ()
) -> None:
    """Send one frame; returns when the kernel has all of it. Raises `DataTimeout` if the other side
    accepts nothing for the socket's timeout. Everything is checked before the first byte is sent:
    after a plain `DataError` nothing was sent, after any other error a part may have been."""
    checked = [_as_numbers(i, array) for i, array in enumerate(arrays)]
    described = [[_name(a.dtype), list(a.shape)] for a in checked]
    text = json.dumps({**header, "arrays": described}, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise DataError(
            f"{len(checked)} arrays in one message need a header of {len(text)} bytes; at most "
            f"{MAX_HEADER_BYTES} are allowed. Join the arrays into fewer, larger ones."
        )
    total = sum(a.nbytes for a in checked)
    _send_all(connection, _joined(_PREFIX.pack(_MAGIC, len(text), total) + text, checked))


def read_frame(
    connection: socket.socket,
    max_header_bytes: int = MAX_HEADER_BYTES,
    *,
    max_bytes: int | None = None,
    deadline: float | None = None,
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The next frame: its header and its arrays. Without a deadline (by `time.monotonic`) it waits
    for a frame or the end of the connection."""
    prefix = bytearray(_PREFIX.size)
    _fill(connection, [memoryview(prefix)], deadline)
    magic, header_bytes, total = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise FrameError(f"bytes {bytes(prefix[:4])!r} are not the start of a frame")
    if not 0 < header_bytes <= max_header_bytes:
        raise FrameError(f"a header of {header_bytes} bytes; at most {max_header_bytes} are read")
    if max_bytes is not None and total > max_bytes:
        raise FrameError(f"{total} bytes of arrays where at most {max_bytes} are expected")
    text = bytearray(header_bytes)
    _fill(connection, [memoryview(text)], deadline)
    header, types = _checked_header(text, total)
    try:
        arrays = [_fresh(dtype, shape) for dtype, shape in types]
    except MemoryError as error:
        raise FrameError(f"no memory for {total} bytes of arrays") from error
    _fill(connection, [_bytes_of(a) for a in arrays if a.size], deadline)
    return header, arrays


def _as_numbers(position: int, given: Any) -> np.ndarray:
    array = np.asarray(given)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not _name(array.dtype):
        raise DataError(
            f"array {position} of the message has dtype {array.dtype}, but only arrays of numbers "
            "can be sent to workers. Give numbers, or leave this leaf out of the batch."
        )
    return array if array.flags.c_contiguous else np.array(array, order="C")


@functools.cache
def _name(dtype: np.dtype) -> str:
    """The name of a dtype in headers; empty for one that cannot be sent."""
    try:
        return dtype.name if _dtype(dtype.name) == dtype else ""
    except FrameError:
        return ""


@functools.lru_cache(256)
def _dtype(name: str) -> np.dtype:
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise FrameError(f"{shortened(name)} is no dtype") from error
    if dtype.kind not in _NUMBER_KINDS or dtype.hasobject or dtype.name != name or dtype.names:
        raise FrameError(f"{shortened(name)} is not a dtype of numbers")
    if dtype.kind == "V" and not hasattr(ml_dtypes, name):
        raise FrameError(f"{shortened(name)} is not a dtype of numbers")
    return dtype


def _checked_header(
    text: bytearray, total: int
) -> tuple[dict[str, Any], list[tuple[np.dtype, tuple[int, ...]]]]:
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is not JSON: {error}") from error
    described = header.get("arrays") if isinstance(header, dict) else None
    if not isinstance(described, list):
        raise FrameError("the header does not list its arrays")
    types = [_checked_type(one) for one in described]
    if sum(dtype.itemsize * math.prod(shape) for dtype, shape in types) != total:
        raise FrameError(f"the arrays of the header do not have {total} bytes")
    return header, types


def _checked_type(described: Any) -> tuple[np.dtype, tuple[int, ...]]:
    match described:
        case [str(name), list(shape)] if len(shape) <= _MAX_RANK and all(
            type(size) is int and 0 <= size < 2**62 for size in shape
        ):
            return _dtype(name), tuple(shape)
    raise FrameError(f"{shortened(described)} is not a dtype and a shape")


def _fresh(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    try:
        num_bytes = dtype.itemsize * math.prod(shape)
        if num_bytes <= _SMALL_BYTES:
            return np.empty(shape, dtype)
        room = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    except ValueError as error:  # larger than the address space
        raise MemoryError(str(error)) from error
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + num_bytes].view(dtype).reshape(shape)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _joined(head: bytes, arrays: Sequence[np.ndarray]) -> list[memoryview]:
    """The bytes to send in few buffers: small arrays are copied behind the buffer before them."""
    buffers: list[memoryview] = []
    small = bytearray(head)
    for array in arrays:
        if array.nbytes <= _SMALL_BYTES:
            small += _bytes_of(array) if array.size else b""
        else:
            buffers += [memoryview(small)] if small else []
            buffers.append(_bytes_of(array))
            small = bytearray()
    return [*buffers, memoryview(small)] if small else buffers


def _send_all(connection: socket.socket, buffers: list[memoryview]) -> None:
    left = buffers[::-1]  # the next one is at the end, where removing it is fast
    while left:
        batch = left[: -_BUFFERS_PER_CALL - 1 : -1]
        try:
            sent = connection.sendmsg(batch)
        except TimeoutError as error:
            raise DataTimeout(
                f"the other side accepted no data for {connection.gettimeout():g} s"
            ) from error
        except OSError as error:
            raise PeerGone(f"the connection broke while sending: {error}") from error
        _advance(left, sent)


def _fill(connection: socket.socket, buffers: list[memoryview], deadline: float | None) -> None:
    left = buffers[::-1]
    while left:
        try:
            count = connection.recvmsg_into(left[: -_BUFFERS_PER_CALL - 1 : -1])[0]
        except TimeoutError:
            count = -1
        except OSError as error:
            raise PeerGone(f"the connection broke while receiving: {error}") from error
        if count == 0:
            raise PeerGone("the other side closed the connection")
        if deadline is not None and time.monotonic() > deadline:
            raise DataTimeout("the other side was silent for too long")
        _advance(left, max(count, 0))


def _advance(left: list[memoryview], count: int) -> None:
    """Take `count` bytes off the end of the reversed list."""
    while left and count >= len(left[-1]):
        count -= len(left.pop())
    if count:
        left[-1] = left[-1][count:]
