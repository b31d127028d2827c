"""Options of XLA's compiler for one program: as users give them ↔ as plans keep them.

    {"xla_gpu_enable_latency_hiding_scheduler": True} ↔ (("xla_gpu_…", "true"),)

A plan keeps names and values as text, sorted by name, so that plan files need one type. XLA checks
the names itself when it compiles, since they differ between its versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from autopar.errors import ArgumentError
from autopar.ir.mesh import ClusterSpec

XlaValue = bool | int | float | str
StoredOptions = tuple[tuple[str, str], ...]

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"

_NAME = re.compile(r"xla_[a-z0-9_]{1,120}")
_MOST_TEXT = 1000


def checked_xla_options(given: object, where: str) -> dict[str, XlaValue]:
    """The options, copied; `ArgumentError` if they are none."""
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{where}={given!r}): needs a dict such as {_EXAMPLE}.")
    for name, value in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ArgumentError(
                f"{where}={{{name!r}: …}}): an option of XLA is named xla_…, without dashes, such "
                f"as {_EXAMPLE}."
            )
        if not isinstance(value, XlaValue) or (isinstance(value, float) and not isfinite(value)):
            raise ArgumentError(
                f"{where}={{{name!r}: {value!r}}}): a value is True, False, a number or text, such "
                f"as {_EXAMPLE}."
            )
        if isinstance(value, str) and len(value) > _MOST_TEXT:
            raise ArgumentError(
                f"{where}={{{name!r}: …}}): a text of {len(value)} characters; XLA's options have "
                f"{_MOST_TEXT} at most."
            )
    return dict(given)


_EXAMPLE = f"{{{LATENCY_HIDING!r}: True}}"


def stored_options(options: Mapping[str, XlaValue]) -> StoredOptions:
    """As a plan keeps them."""
    return tuple((name, _text(options[name])) for name in sorted(options))


def overridden(
    stored: StoredOptions | None, by: Mapping[str, XlaValue] | StoredOptions
) -> StoredOptions | None:
    """The options with those that others replace; None for XLA's defaults."""
    others = stored_options(by) if isinstance(by, Mapping) else by
    return tuple(sorted({**dict(stored or ()), **dict(others)}.items())) or None


def flag_names(flags: str) -> set[str]:
    """The options that a text such as that of XLA_FLAGS sets."""
    return {word.partition("=")[0].lstrip("-") for word in flags.split()}


def hides_latency(options: Mapping[str, XlaValue]) -> bool:
    """Whether XLA schedules a program so that collectives run under compute, which is its default
    on GPUs. If not, it schedules for the least memory."""
    return _text(options.get(LATENCY_HIDING, True)) in ("true", "1")


def may_schedule_otherwise(cluster: ClusterSpec, options: Mapping[str, XlaValue]) -> bool:
    """Whether a step can also be scheduled for the least memory: XLA hides collectives by default,
    which the user has not chosen."""
    hides = cluster.num_devices > 1 and cluster.spec.hides_collectives
    return hides and LATENCY_HIDING not in options


def compiler_options(stored: Sequence[tuple[str, str]] | None) -> dict[str, Any] | None:
    """As `jax.stages.Lowered.compile(compiler_options=…)` takes them; None for XLA's defaults."""
    return {name: _value(text) for name, text in stored} if stored else None


def are_stored(stored: Sequence[tuple[str, str]]) -> bool:
    """Whether options from a file have the form in which plans keep them."""
    names = [name for name, _ in stored]
    return names == sorted(set(names)) and all(
        _NAME.fullmatch(name) and len(text) <= _MOST_TEXT for name, text in stored
    )


def _text(value: XlaValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(text: str) -> XlaValue:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
