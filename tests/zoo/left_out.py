"""Packages that the zoo does not show, and why: the one list, which docs/zoo.md repeats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeftOut:
    """`tried` is the release, and with which JAX."""

    package: str
    tried: str
    reason: str


LEFT_OUT: tuple[LeftOut, ...] = ()
