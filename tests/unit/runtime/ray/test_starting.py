"""Meshes that start anew when something that they need is still held by others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import ClusterError
from autopar.runtime.ray import starting
from autopar.runtime.ray.starting import _Begun, _checked, _Occupied, _start_mesh
from autopar.runtime.ray.worker import CommandOutcome, Joined

NO_GPU = "RuntimeError: Unable to initialize backend 'cuda': INTERNAL: no supported devices"


def session_of(ranks_per_gpu: int = 8) -> Any:
    node = SimpleNamespace(described=lambda: "vm (10.0.0.1)")
    host = SimpleNamespace(node=node)
    return SimpleNamespace(ranks_per_gpu=ranks_per_gpu, hosts=[host], devices_per_host=8)


def begun() -> Any:
    place = SimpleNamespace(node="vm (10.0.0.1)", devices=(3,), mesh_devices=(3,))
    return _Begun(place, SimpleNamespace(), actor=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["bind: address already in use", NO_GPU])
def test_what_another_try_may_get(said: str) -> None:
    with pytest.raises(_Occupied):
        _checked(session_of(), begun(), CommandOutcome(raised=said))


def test_a_gpu_of_its_own_that_jax_does_not_find_is_an_error_at_once() -> None:
    with pytest.raises(ClusterError, match=r"devices \[3\] could not start.*backend 'cuda'"):
        _checked(session_of(ranks_per_gpu=1), begun(), CommandOutcome(raised=NO_GPU))


def test_a_mesh_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([CommandOutcome(raised=NO_GPU), CommandOutcome(Joined("H200", 1, 1))])
    ended: list[Any] = []
    monkeypatch.setattr(starting, "PAUSE_S", 0.01)
    monkeypatch.setattr(starting, "_places_of", lambda *_: [(begun().place, begun().host)])
    monkeypatch.setattr(starting, "_make_actor", lambda *_: object())
    monkeypatch.setattr(starting, "_kill", lambda _, actors: ended.extend(actors))
    monkeypatch.setattr(
        starting, "_join", lambda s, b, *_: (_checked(s, b[0], next(outcomes)), b[0].actor)
    )
    joined, actor = _start_mesh(session_of(), (3,), 60.0, threading.Event())
    assert joined == Joined("H200", 1, 1)
    assert len(ended) == 1 and ended[0] is not actor  # only the one that got no share


def test_the_last_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(session: Any, begun: Any, *_: Any) -> Any:
        return _checked(session, begun[0], CommandOutcome(raised=NO_GPU))

    monkeypatch.setattr(starting, "PAUSE_S", 0.01)
    monkeypatch.setattr(starting, "_places_of", lambda *_: [(begun().place, begun().host)])
    monkeypatch.setattr(starting, "_make_actor", lambda *_: object())
    monkeypatch.setattr(starting, "_kill", lambda *_: None)
    monkeypatch.setattr(starting, "_join", join)
    with pytest.raises(ClusterError, match=r"3 times on vm.*no share of its GPU(.|\n)*fewer mesh"):
        _start_mesh(session_of(), (3,), 60.0, threading.Event())
