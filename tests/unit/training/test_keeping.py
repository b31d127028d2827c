"""Which checkpoints stay, and which results count as bad."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.training.keeping import NonFiniteError, ResultCheck, scalars, superfluous

STEPS = [0, 10, 20, 30, 40, 50]
METRICS = {0: 9.0, 10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0, 50: 5.0}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 2}, [40, 50]),
        ({"keep": None}, STEPS),
        ({"keep": 1, "unproven": {50}}, [40, 50]),  # the newest good one stays
        ({"keep": 1, "unproven": {40, 50}}, [30, 50]),
        ({"keep": 1, "keep_every": 20}, [20, 40, 50]),
        ({"keep": 1, "keep_best": 2}, [20, 30, 50]),
        ({"keep": 1, "keep_best": 1, "unproven": {20, 50}}, [30, 40, 50]),
        ({"keep": 1, "keep_best": 1, "metrics": {10: np.nan, 30: 7.0}}, [30, 50]),
    ],
)
def test_which_stay(options: dict[str, Any], kept: list[int]) -> None:
    defaults = {"keep_every": None, "keep_best": None, "metrics": METRICS, "unproven": ()}
    gone = superfluous(STEPS, **{**defaults, **options})
    assert [step for step in STEPS if step not in gone] == kept


def test_scalars_are_floating_point_numbers_alone() -> None:
    results = {"a": jnp.float32(1), "b": np.ones(2), "c": 3, "d": 4.0, "e": np.float16(5)}
    assert [float(one) for one in scalars(results)] == [1, 4, 5]
    assert scalars(None) == []


def test_results_are_looked_at_one_step_late() -> None:
    check = ResultCheck(True)
    check.add(1, jnp.float32(1))
    check.add(2, (jnp.float32(2), {"norm": np.inf}))
    assert check.last == {1: 1.0}
    with pytest.raises(NonFiniteError, match="Step 2 gave inf") as raised:
        check.add(3, jnp.float32(3))
    assert raised.value.step == 2 and check.last == {}
    check.check_all()
    assert check.last == {3: 3.0}
    off = ResultCheck(False)
    off.add(1, np.nan)
    off.check_all()
    assert off.last == {}
