"""NCCL by files: a communicator is a folder, a message a file in it.

As with the real one, calls of a group are done on their streams after `groupEnd` has returned; but
at the first exchange of two ranks, `groupEnd` waits for the other one. `abort` ends what waits.
"""

import ctypes
import os
import pathlib
import secrets
import threading
import time

from cupy.cuda import runtime

available = True
NCCL_UINT8 = 1
_LIMIT_S = 30.0
_local = threading.local()  # groups are of a thread


class NcclError(RuntimeError):
    pass


def get_unique_id():
    """The communicator's folder: processes may have been given different ones."""
    return str(runtime.FOLDER / secrets.token_hex(8)).encode().ljust(128)


def groupStart():
    assert not getattr(_local, "calls", None)
    _local.calls = []


def groupEnd():
    """What leaves goes first, so that who sends to itself finds it."""
    calls, _local.calls = _local.calls, None
    for _, _, connect in calls:
        if connect is not None:
            connect()
    for order in (0, 1):
        for at, job, _ in calls:
            if at == order and job is not None:
                job()


def _wait(condition, is_over=lambda: False):
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if is_over():
            return False
        if time.monotonic() > deadline:
            raise NcclError("nobody came")
        time.sleep(0.001)
    return True


class NcclCommunicator:
    def __init__(self, size, unique_id, rank):
        assert len(unique_id) == 128
        self.folder = pathlib.Path(unique_id.decode().strip())
        self.size, self.rank = size, rank
        self.counts = {}
        self.connected = {rank}
        self.ended = False
        self.failed = None
        self.folder.mkdir(exist_ok=True)
        self._touch(f"rank{rank}")
        everyone = [self.folder / f"rank{other}" for other in range(size)]

        def meet():
            _wait(lambda: all(path.exists() for path in everyone))

        if getattr(_local, "calls", None) is not None:
            _local.calls.append((0, None, meet))
        else:
            meet()

    def check_async_error(self):
        if self.failed:
            raise self.failed

    def send(self, pointer, count, datatype, peer, stream):
        self._put(datatype, peer, 0, lambda: self._write(pointer, count, peer))

    def recv(self, pointer, count, datatype, peer, stream):
        self._put(datatype, peer, 1, lambda: self._read(pointer, count, peer))

    def broadcast(self, source, target, count, datatype, root, stream):
        assert self.size > 1
        if self.rank == root:
            for rank in range(self.size):
                if rank != root:
                    self.send(source, count, datatype, rank, stream)
        else:
            self.recv(target, count, datatype, root, stream)

    def destroy(self):
        self.ended = True
        (self.folder / f"rank{self.rank}").unlink(missing_ok=True)

    abort = destroy

    def _put(self, datatype, peer, order, job):
        assert _local.calls is not None and datatype == NCCL_UINT8 and 0 <= peer < self.size
        if self.ended:
            raise NcclError("the communicator was aborted")
        put = runtime.asked.stream.put
        _local.calls.append((order, lambda: put(job), lambda: self._connect(peer)))

    def _connect(self, peer):
        if peer not in self.connected:
            self._touch(f"{self.rank}with{peer}")
            other = self.folder / f"{peer}with{self.rank}"
            if _wait(other.exists, lambda: self.ended):
                self.connected.add(peer)

    def _touch(self, name):
        (self.folder / name).touch()

    def _path(self, what, source, target):
        number = self.counts.get((what, source, target), 0)
        self.counts[what, source, target] = number + 1
        return self.folder / f"{source}to{target}.{number}"

    def _write(self, pointer, count, peer):
        path = self._path("sent", self.rank, peer)
        path.with_suffix(".part").write_bytes(ctypes.string_at(pointer, count))
        os.rename(path.with_suffix(".part"), path)

    def _read(self, pointer, count, peer):
        path = self._path("received", peer, self.rank)
        if not _wait(path.exists, lambda: self.ended):
            return
        data = path.read_bytes()
        path.unlink()
        if len(data) != count:
            self.failed = NcclError(f"{len(data)} bytes came where {count} were expected")
            raise self.failed
        ctypes.memmove(pointer, data, count)
