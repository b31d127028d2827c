"""The results of a training run's last step, beside its checkpoints: a pytree of numbers ↔ JSON.

A run that is started again after its end has no step to take results from. Results that are not
numbers in dicts, lists and tuples are not kept.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from autopar.progress import LOGGER
from autopar.runtime.checkpoints.objects import Location, read_limited, write_whole

FILE = "last_results.json"
_MOST_BYTES = 1 << 20


def write_last_results(directory: Location, step: int, results: Any) -> None:
    """Keep them with the number of the step."""
    plain = _plain(results)
    if plain is not None:
        text = json.dumps({"step": step, "results": plain})
        if len(text) <= _MOST_BYTES:
            write_whole(directory / FILE, text)


def finished_results(directory: Location, done: int, num_steps: int | None) -> Any:
    """Says that an earlier run has done all steps; returns the results of the last one."""
    LOGGER.warning(
        "run_training: the run in %s is finished: its %d steps are done%s. The state is that of "
        "its last checkpoint, and on_step is not called. To train on, give %s; to start anew, "
        "another checkpoint_dir.",
        directory,
        done,
        "" if num_steps is None else f", and num_steps={num_steps}",
        "more batches" if num_steps is None else "a larger num_steps",
    )
    return read_last_results(directory, done)


def read_last_results(directory: Location, step: int) -> Any:
    """Those of this step; None if they are not there."""
    try:
        found = json.loads(read_limited(directory / FILE, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        LOGGER.warning("%s: cannot be read: %s", directory / FILE, error)
        return None
    if not isinstance(found, dict) or found.get("step") != step:
        return None
    return _restored(found.get("results"))


def _plain(value: Any) -> Any:
    """JSON of a number, dict, list or tuple; None if anything else is in it."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)) and value.ndim == 0:
        number = value.item()
        return {"number": number} if isinstance(number, (bool, int, float)) else None
    if isinstance(value, (bool, int, float)):
        return {"number": value}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        entries = {key: _plain(entry) for key, entry in value.items()}
        return None if None in entries.values() else {"dict": entries}
    if type(value) in (list, tuple):
        parts = [_plain(entry) for entry in value]
        return None if None in parts else {type(value).__name__: parts}
    return None


def _restored(plain: Any) -> Any:
    match plain:
        case {"number": bool() | int() | float() as number}:
            return number
        case {"dict": dict() as entries}:
            return {key: _restored(entry) for key, entry in entries.items()}
        case {"list": list() as parts}:
            return [_restored(part) for part in parts]
        case {"tuple": list() as parts}:
            return tuple(_restored(part) for part in parts)
    return None
