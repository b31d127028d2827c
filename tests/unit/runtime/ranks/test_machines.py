"""Where processes are, exchanged through one store; the processes are played one after another.

`tests/equivalence/test_multi_controller.py` has real ones.
"""

from __future__ import annotations

import jax
import pytest

from autopar import _jax
from autopar.runtime.ranks import machines
from autopar.runtime.ranks.machines import ProcessPlace, own_place, places_of_processes


@pytest.fixture
def store(monkeypatch) -> dict[str, bytes]:
    values: dict[str, bytes] = {}

    def put(key: str, value: bytes) -> None:
        assert key not in values  # the coordination service refuses it
        values[key] = value

    monkeypatch.setattr(_jax, "store_set", put)
    monkeypatch.setattr(_jax, "store_get", lambda key, limit_s: values.get(key))
    return values


def ask(monkeypatch, process: int, count: int, place: ProcessPlace) -> object:
    """What a process learns that has not asked before."""
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(machines, "own_place", lambda: place)
    monkeypatch.setattr(machines, "_places", None)
    return places_of_processes()


PLACES = (ProcessPlace("a", 1e9), ProcessPlace("a", 2e9), ProcessPlace("b"))


def test_all_learn_where_all_are(store, monkeypatch) -> None:
    for process in (1, 2):
        monkeypatch.setattr(machines, "_told", False)
        with pytest.warns(UserWarning, match="from process 0 about its machine"):
            assert ask(monkeypatch, process, 3, PLACES[process]) is None
    assert ask(monkeypatch, 0, 3, PLACES[0]) == PLACES
    for process in (1, 2):  # they ask again, and tell nothing again
        assert ask(monkeypatch, process, 3, PLACES[process]) == PLACES


def test_what_is_known_is_not_asked_again(store, monkeypatch) -> None:
    store["autopar/machines/1"] = b'["a", 2e9]'
    assert ask(monkeypatch, 0, 2, PLACES[0]) == PLACES[:2]
    store.clear()
    assert places_of_processes() == PLACES[:2]


def test_those_that_say_nothing_are_named(store, monkeypatch) -> None:
    store["autopar/machines/2"] = b'["b", null]'
    with pytest.warns(UserWarning, match=r"within 30 s from processes 1, 3 about .*cluster=…"):
        assert ask(monkeypatch, 0, 4, PLACES[0]) is None
    assert "autopar/machines/all" not in store
    store["autopar/machines/1"] = store["autopar/machines/3"] = b'["b", null]'
    assert ask(monkeypatch, 0, 4, PLACES[0]) == (PLACES[0], *[PLACES[2]] * 3)


def test_this_process_is_on_a_machine_and_its_cpus_have_no_limit() -> None:
    assert own_place() == own_place()
    assert own_place().machine and own_place().memory_bytes is None


def test_machines_of_equal_names_differ_by_their_boot(monkeypatch, tmp_path) -> None:
    first = own_place()
    monkeypatch.setattr(machines, "_BOOT_ID", tmp_path / "boot_id")
    assert own_place().machine == first.machine.split()[0]  # not Linux
    (tmp_path / "boot_id").write_text("another\n")
    assert own_place().machine == f"{first.machine.split()[0]} another"
