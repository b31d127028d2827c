"""The state of a Ray session: its nodes, hosts and workers, its limits, and its failure."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from autopar.errors import AutoparError, WorkerError
from autopar.runtime.ray.worker import Hello, Joined, progress_path
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.progress import State

# How many times as long as others a command may take: XLA compiles some programs for hours.
_PATIENCE = {"compiled": 4.0, "load": 4.0, "announce": 4.0}

Describe = Callable[[WorkerPlace, State], tuple[int | None, str]]


@dataclass(frozen=True)
class NodeHandle:
    """A node in use: its agent (an actor), its bundle of the placement group, and the session's
    folder there."""

    agent: Any
    bundle: int
    node_id: str
    address: str
    name: str
    folder: str
    gpu_ids: tuple[str, ...]
    gpu_names: tuple[str, ...]

    def described(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Host:
    number: int
    node: NodeHandle
    gpu_ids: tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    """Seconds. A worker is asked every `heartbeat_s`. It counts as lost when it has not answered
    for `silence_s`, a step has made no progress for `hang_s`, or another command for `command_s`.
    """

    heartbeat_s: float
    silence_s: float
    hang_s: float
    start_s: float
    command_s: float

    def of(self, command: str, is_step: bool) -> float:
        """How long a command may make no progress."""
        return self.hang_s if is_step else self.command_s * _PATIENCE.get(command, 1.0)


@dataclass(frozen=True, eq=False)
class Worker:
    """A running worker: its place, its process and devices, and how to reach it."""

    place: WorkerPlace
    hello: Hello
    joined: Joined
    actor: Any
    node: NodeHandle

    def described(self) -> dict[str, Any]:
        """The process, as the agent of its node knows it."""
        return {**self.hello.process(), "progress": progress_path(self.place)}


@dataclass(eq=False)
class RaySession:
    """The monitor sets `failure` once; everyone who waits then raises it. `ranks_per_gpu`: how many
    devices, each of another process, a GPU counts as."""

    ray: Any
    id: str
    token: str = field(repr=False)
    platform: str
    devices_per_host: int
    limits: Limits
    env: Mapping[str, str]
    executor: str
    ranks_per_gpu: int = 1
    hosts: tuple[Host, ...] = ()
    nodes: tuple[NodeHandle, ...] = ()
    placement_group: Any = None
    failure: WorkerError | None = None
    describe: Describe = lambda place, state: (None, "")
    lock: threading.RLock = field(default_factory=threading.RLock)
    worker_numbers: Any = field(default_factory=itertools.count)

    def check(self) -> None:
        if self.failure is not None:
            raise fresh(self.failure)


@cache
def remote_class(ray: Any, cls: type) -> Any:
    """The class as actors have it, made once: Ray keeps every one that it makes."""
    return ray.remote(cls)


def fresh(error: AutoparError) -> AutoparError:
    """A copy of an error that several threads raise: each raised one gets its own traceback."""
    twin = copy.copy(error)
    twin.__cause__ = error.__cause__
    return twin
