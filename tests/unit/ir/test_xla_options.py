"""Options of XLA's compiler: checked, kept in plans as text, and given back as they were."""

from __future__ import annotations

import pytest

from autopar.errors import ArgumentError
from autopar.ir.xla_options import (
    are_stored,
    checked_xla_options,
    compiler_options,
    stored_options,
)

OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 33554432,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS",
    "xla_backend_extra": 0.5,
    "xla_disable_all_hlo_passes": False,
}


def test_options_survive_storing() -> None:
    stored = stored_options(OPTIONS)
    assert are_stored(stored)
    assert compiler_options(stored) == OPTIONS
    assert [type(value) for value in (compiler_options(stored) or {}).values()] == [
        type(OPTIONS[name]) for name in sorted(OPTIONS)
    ]


def test_no_options_are_xla_s_defaults() -> None:
    assert compiler_options(()) is None
    assert compiler_options(None) is None


@pytest.mark.parametrize(
    "given",
    [
        ["xla_x"],
        {"--xla_gpu_x": True},
        {"gpu_x": True},
        {3: True},
        {"xla_x": None},
        {"xla_x": [1]},
        {"xla_x": float("nan")},
        {"xla_x": "y" * 1001},
    ],
)
def test_what_is_no_option_is_refused(given: object) -> None:
    with pytest.raises(ArgumentError, match="xla_options"):
        checked_xla_options(given, "ShardingOptions(xla_options")


def test_the_given_dict_is_copied() -> None:
    given = {"xla_x": True}
    checked = checked_xla_options(given, "f(xla_options")
    given["xla_y"] = True
    assert checked == {"xla_x": True}


@pytest.mark.parametrize(
    "stored",
    [
        (("xla_b", "1"), ("xla_a", "1")),
        (("xla_a", "1"), ("xla_a", "2")),
        (("--xla_a", "1"),),
        (("xla_a", "y" * 1001),),
    ],
)
def test_a_file_with_others_is_refused(stored: tuple[tuple[str, str], ...]) -> None:
    assert not are_stored(stored)
