"""Threads of a driver that call different steps on the same workers and links, in random order.

Workers wait for each other in collectives, in transfers between meshes, and where they make
communicators. If two meshes got such commands in different orders, each could wait for the other
for ever. So all commands of a session must reach all workers in one order. Here threads make plans,
run them, and hand their states from plan to plan, with random pauses before each command. Every
result must be that of one device, every wait has a limit, and the order of commands is compared.
`test_interleavings.py` runs this on CPU workers, `tests/gpu/test_ray_gpu.py` on GPUs.
"""

from __future__ import annotations

import faulthandler
import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from autopar import session
from tests.ray import training
from tests.ray.training import Near

LIMIT_S = 240.0
PAUSE_S = 0.01

Waiting = tuple[str, int]  # a command in which workers wait for each other, and its number


class Commands:
    """The commands in which workers wait for each other, per mesh in the order they were sent. Each
    is delayed by a random pause, so that those of other threads come between."""

    def __init__(self, seed: int) -> None:
        self.by_mesh: dict[tuple[int, ...], list[Waiting]] = {}
        self._rng = random.Random(seed)
        self._in_thread = threading.local()
        self._numbers = itertools.count()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the commands of the current session."""
        remote: Any = session.current().remote
        group_type = type(remote.cluster._groups[0])
        submit, prepare_links = group_type.submit, remote.prepare_links

        def watching_submit(group: Any, command: str, args: Sequence[Any], **options: Any) -> Any:
            time.sleep(self._rng.uniform(0, PAUSE_S))
            number = None
            if command == "step":
                number = next(own for own in args if own is not None)[0].first_tag
            elif command == "prepare":
                number = self._in_thread.number
            # Sent and noted at once: the session's lock is the one that the group takes.
            with group._session.lock:
                replies = submit(group, command, args, **options)
                if number is not None:
                    self.by_mesh.setdefault(group.devices, []).append((command, number))
            return replies

        def numbered_prepare_links(*args: Any) -> None:
            self._in_thread.number = next(self._numbers)
            prepare_links(*args)

        group_type.submit, remote.prepare_links = watching_submit, numbered_prepare_links
        try:
            yield
        finally:
            group_type.submit, remote.prepare_links = submit, prepare_links

    def check_one_order(self) -> None:
        """Any two meshes got the commands that concern both in the same order."""
        for one, other in itertools.combinations(self.by_mesh.values(), 2):
            common = set(one) & set(other)
            order = [command for command in one if command in common]
            assert order == [command for command in other if command in common]


class Caller:
    """A thread with a state of its own, which it takes from step to step."""

    def __init__(self, number: int, steps: Sequence[Any], num_calls: int, seed: int) -> None:
        self._rng = random.Random(seed)
        # Its own step first: threads make their plans at the same time.
        self._steps = [steps[number], *self._rng.choices(steps, k=num_calls - 1)]
        self._number = number
        self.state: Any = training.make_state(number)
        self.losses: list[float] = []
        self.error: BaseException | None = None

    def batch(self, index: int) -> Any:
        return training.batch_of(100 * self._number + index)

    def call_all(self, planned: threading.Barrier) -> None:
        try:
            pending = []
            for index, step in enumerate(self._steps):
                self.state, results = step(self.state, self.batch(index))
                pending.append(results["loss"])
                if index == 0:
                    planned.wait(LIMIT_S)
                if self._rng.random() < 0.3:
                    self.losses += [float(loss) for loss in pending]
                    pending.clear()
                time.sleep(self._rng.uniform(0, PAUSE_S))
            self.losses += [float(loss) for loss in pending]
        except BaseException as error:
            self.error = error
            planned.abort()

    def check(self, near: Near) -> None:
        serial, state = jax.jit(training.train), training.make_state(self._number)
        want = []
        for index in range(len(self._steps)):
            state, results = serial(state, self.batch(index))
            want.append(float(results["loss"]))
        np.testing.assert_allclose(self.losses, want, rtol=near.rtol)
        near.check(self.state, state, f"caller {self._number}")


def call_in_random_order(steps: Sequence[Any], num_calls: int, seed: int, near: Near) -> None:
    """A thread for each step. Each makes the plan of its own step, then calls any of them."""
    commands = Commands(seed)
    callers = [Caller(n, steps, num_calls, seed + n) for n in range(len(steps))]
    planned = threading.Barrier(len(callers))
    threads = [
        threading.Thread(target=caller.call_all, args=(planned,), name=f"caller {n}", daemon=True)
        for n, caller in enumerate(callers)
    ]
    until_s = time.monotonic() + LIMIT_S
    with commands.watched():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            faulthandler.dump_traceback(sys.stderr)
    assert not stuck, f"seed {seed}: {stuck} did not end within {LIMIT_S:.0f} s"
    for caller in callers:
        if caller.error is not None and not isinstance(caller.error, threading.BrokenBarrierError):
            raise caller.error
    commands.check_one_order()
    assert {command for sent in commands.by_mesh.values() for command, _ in sent} == {
        "prepare",
        "step",
    }
    for caller in callers:
        caller.check(near)
