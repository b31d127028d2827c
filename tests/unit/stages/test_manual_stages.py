"""Stages as users give them."""

from __future__ import annotations

import pytest

from autopar.errors import ArgumentError
from autopar.stages.manual_stages import check_layer_ids


def test_layers_of_the_step():
    check_layer_ids([[0, 1], [2], [3, 4, 5]], 6)


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([[0, 1], [2, 3, 4]], "no stage has layer 5: the step has 6 layers"),
        ([[0, 1, 2], [3, 4, 5, 6]], "there is no layer 6: the step has 6 layers"),
        ([[0, 1, 2], [2, 3, 4, 5]], "twice or out of order"),
        ([[3, 4, 5], [0, 1, 2]], "twice or out of order"),
        ([[0, 1, 2, 3, 4, 5], []], "a stage has no layer"),
    ],
)
def test_layers_that_are_not_those_of_the_step(ids, wrong):
    with pytest.raises(ArgumentError) as caught:
        check_layer_ids(ids, 6)
    assert str(caught.value).startswith("ManualStages(layer_ids=")
    assert wrong in str(caught.value)
