"""What each rank of `test_failures.py` runs: a few steps, and then what the scenario says.

python failing_ranks.py SCENARIO
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

FAILING = 1


def train_step(w: Any, x: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def refuse(*_: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating a lot.")


def main(scenario: str) -> None:
    jax.distributed.initialize()
    is_failing = jax.process_index() == FAILING
    step = autopar.parallelize(train_step, method=autopar.DataParallel())
    w, x = np.ones((4, 4), np.float32), np.ones((6, 4), np.float32)
    for _ in range(2):
        w, loss = step(w, x)
    print(f"loss {float(loss)}", flush=True)
    if scenario == "in the step" and is_failing:
        step.last_executable.compiled = refuse
    elif scenario in ("between steps", "while others compute") and is_failing:
        raise OSError("no such file")
    elif scenario == "while others compute":
        time.sleep(4)  # the failure is known when they call the step
    if scenario not in ("all well", "at the end", "all at the end"):
        w, loss = step(w, x)
        loss.block_until_ready()
    if scenario == "all at the end" or (scenario == "at the end" and is_failing):
        raise OSError("no such file")


if __name__ == "__main__":
    main(sys.argv[1])
