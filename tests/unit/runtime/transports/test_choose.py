from __future__ import annotations

import importlib.util

import pytest

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.transports.choose import (
    NAMES,
    available_transports,
    choose,
    make_transport,
)

ALL = set(NAMES)
NO_NCCL = {"cuda_ipc", "jax_transfer"}


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv("AUTOPAR_TRANSPORT", raising=False)


@pytest.mark.parametrize(
    ("platform", "available", "expected"),
    [
        ("cpu", ALL, "jax_transfer"),
        ("gpu", ALL, "nccl"),
        ("gpu", NO_NCCL, "jax_transfer"),
        ("gpu", {"jax_transfer"}, "jax_transfer"),
    ],
)
def test_what_is_chosen(platform, available, expected):
    assert choose(platform, available) == expected


def test_the_variable_decides(monkeypatch):
    monkeypatch.setenv("AUTOPAR_TRANSPORT", "jax_transfer")
    assert choose("gpu", ALL) == "jax_transfer"
    monkeypatch.setenv("AUTOPAR_TRANSPORT", "carrier pigeon")
    with pytest.raises(ArgumentError, match="'carrier pigeon': unknown transport"):
        choose("gpu", ALL)


def test_cpus_have_one_transport():
    assert available_transports("cpu") == ("jax_transfer",)


def place(platform):
    return WorkerPlace(3, 0, 1, 0, "n1", (0,), (0,), platform, "127.0.0.1", "token", "/tmp")


def test_what_cannot_be_made_says_why():
    with pytest.raises(ArgumentError, match="name is 'pigeon'"):
        make_transport("pigeon", place("cpu"))
    with pytest.raises(ClusterError, match="'nccl' is for GPUs; worker 3 on n1 has cpu devices"):
        make_transport("nccl", place("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is there")
@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_without_cupy_the_extra_is_named(name):
    with pytest.raises(ClusterError, match=rf"'{name}' needs CuPy.*cuda12.*cuda13"):
        make_transport(name, place("gpu"))
