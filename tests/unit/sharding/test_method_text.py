"""A plan's method as text, and back to what matters of it."""

import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.sharding.method_text import method_text, read_method

CASES = {
    "plain": (autopar.ShardParallel(), "ShardParallel", set(), False),
    "numbers": (
        autopar.ShardParallel(num_micro_batches=4),
        "ShardParallel",
        {"num_micro_batches"},
        False,
    ),
    "pins": (
        autopar.ShardParallel(options=autopar.ShardingOptions(pins={"w": PartitionSpec("x")})),
        "ShardParallel",
        {"options", "pins"},
        True,
    ),
    "allowed collectives": (
        autopar.ShardParallel(options=autopar.ShardingOptions(allow_all_to_all=False)),
        "ShardParallel",
        {"options", "allow_all_to_all"},
        True,
    ),
    "zero": (autopar.Zero3Parallel(), "Zero3Parallel", set(), False),
    "manual": (autopar.ManualParallel((2,), ("x",), None), "ManualParallel", None, True),
}


@pytest.mark.parametrize("method, name, arguments, constrains", CASES.values(), ids=CASES)
def test_a_method_is_read_from_its_text(method, name, arguments, constrains):
    summary = read_method(method_text(method))
    assert summary.name == name
    assert arguments is None or summary.arguments == arguments
    assert summary.constrains_layouts is constrains


def test_a_pattern_that_looks_like_an_option_is_none():
    options = autopar.ShardingOptions(memory_budget_bytes=1)
    assert not read_method(method_text(autopar.ShardParallel(options=options))).constrains_layouts
    assert not read_method("ShardParallel(name='pins=')").constrains_layouts


def test_a_text_that_is_no_call_has_a_name():
    assert read_method("Custom(<object at 0x1>)").name == "Custom"
