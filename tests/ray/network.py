"""Cuts the network of a running process: from its number to sockets that receive nothing more.

A packet filter in the kernel drops whatever arrives at the process's TCP sockets, as a firewall
that drops packets would: nobody is told, no connection is closed. Needs root, or the right to trace
the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_libc = ctypes.CDLL(None, use_errno=True)


def cut_network(pid: int) -> int:
    """No TCP socket that the process has now receives anything from now on; returns how many there
    were."""
    count = 0
    for sock in _tcp_sockets(pid):
        _drop_everything(sock)
        count += 1
    return count


def cut_between(sock: socket.socket) -> None:
    """One connection of this process receives nothing more."""
    _drop_everything(sock)


def _tcp_sockets(pid: int) -> Iterator[socket.socket]:
    """The process's TCP sockets, each opened here for as long as the caller looks at it."""
    process = os.pidfd_open(pid)
    try:
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(entry).startswith("socket:"):
                    with contextlib.closing(_taken(process, int(entry.name))) as sock:
                        if sock.family in (socket.AF_INET, socket.AF_INET6):
                            yield sock
    finally:
        os.close(process)


def _taken(process: int, number: int) -> socket.socket:
    found = _libc.syscall(_PIDFD_GETFD, process, number, 0)
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"pidfd_getfd: {os.strerror(error)}")
    return socket.socket(fileno=found)


def _drop_everything(sock: socket.socket) -> None:
    """A program of one instruction: return 0, the number of bytes of a packet to keep."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
    )
