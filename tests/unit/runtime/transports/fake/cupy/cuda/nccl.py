"""NCCL by files: a communicator is a folder, a message a file in it."""

import ctypes
import os
import secrets
import time

from cupy.cuda.runtime import FOLDER

available = True
NCCL_UINT8 = 1
_LIMIT_S = 30.0
_group = []
_depth = 0


class NcclError(RuntimeError):
    pass


def get_unique_id():
    return secrets.token_hex(16).encode().ljust(128)


def groupStart():
    global _depth
    _depth += 1


def groupEnd():
    """What leaves goes first, so that who sends to itself finds it."""
    global _depth
    _depth -= 1
    assert _depth == 0
    calls = sorted(_group, key=lambda call: call[0])
    _group.clear()
    for _, call in calls:
        call()


def _wait(condition):
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise NcclError("nobody came")
        time.sleep(0.001)


class NcclCommunicator:
    def __init__(self, size, unique_id, rank):
        assert len(unique_id) == 128
        self.folder = FOLDER / unique_id.decode().strip()
        self.size, self.rank = size, rank
        self.counts = {}
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"rank{rank}").touch()
        everyone = [self.folder / f"rank{other}" for other in range(size)]
        if _depth:
            _group.append((1, lambda: _wait(lambda: all(path.exists() for path in everyone))))
        else:
            _wait(lambda: all(path.exists() for path in everyone))

    def check_async_error(self):
        return None

    def send(self, pointer, count, datatype, peer, stream):
        self._checked(datatype, peer)
        _group.append((0, lambda: self._write(pointer, count, peer)))

    def recv(self, pointer, count, datatype, peer, stream):
        self._checked(datatype, peer)
        _group.append((1, lambda: self._read(pointer, count, peer)))

    def broadcast(self, source, target, count, datatype, root, stream):
        self._checked(datatype, root)
        assert self.size > 1
        if self.rank == root:
            others = [rank for rank in range(self.size) if rank != root]
            for rank in others:
                _group.append((0, lambda rank=rank: self._write(source, count, rank)))
        else:
            _group.append((1, lambda: self._read(target, count, root)))

    def destroy(self):
        (self.folder / f"rank{self.rank}").unlink(missing_ok=True)
        if not list(self.folder.iterdir()):
            self.folder.rmdir()

    abort = destroy

    def _checked(self, datatype, peer):
        assert _depth == 1 and datatype == NCCL_UINT8 and 0 <= peer < self.size

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
        _wait(path.exists)
        data = path.read_bytes()
        path.unlink()
        if len(data) != count:
            raise NcclError(f"{len(data)} bytes came where {count} were expected")
        ctypes.memmove(pointer, data, count)
