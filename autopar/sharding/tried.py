"""What planning tried before it gave up: from a `MemoryBudgetError` to one that says so.

Micro-batches, recomputation and pipelines reduce the memory of a step. An error says of each
whether it was tried and what came of it, or why it was not, and advises nothing that is known
to be useless. Whether the batch can be cut is found out by cutting it: that takes a trace, once
nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import MemoryBudgetError, MeshError, TraceError
from autopar.ir.failures import Failure, first_line, is_users
from autopar.ir.text import format_bytes
from autopar.methods import AnyMethod, options_of
from autopar.rewrite.step_source import StepSource
from autopar.sharding.planning_log import PlanningLog

MICRO_BATCHES, RECOMPUTATION, PIPELINES = "micro-batches", "recomputation", "pipelines"


def cut_refusal(error: Exception) -> str | None:
    """Why a step has no such micro-batches, if an exception says that it cannot have them."""
    if isinstance(error, (TraceError, MeshError)):
        return first_line(error).split(". ")[0]  # without its advice
    if is_users(error):
        return f"it cannot be called with a micro-batch: {first_line(error)}"
    return None


def why_not_cut(cut: Callable[[int], Any], number: int, log: PlanningLog) -> str | None:
    """Why the batch cannot be cut into so many micro-batches; None if it can be. A failure of ours
    is a reason too, and kept in the log."""
    try:
        cut(number)
    except Exception as error:
        refusal = cut_refusal(error)
        if refusal is not None:
            return refusal
        (failure, *_) = log.contain(f"{number} micro-batches", error)
        return _failed(failure)
    return None


def with_failures(error: MemoryBudgetError, failures: Sequence[Failure]) -> MemoryBudgetError:
    """The error of what does not fit, if other candidates failed."""
    if not failures:
        return error
    texts = [f"{failure.what}: {_failed(failure)}" for failure in failures]
    return error.having_tried({"what failed": "; ".join(dict.fromkeys(texts))})


def having_tried_one_mesh(
    error: MemoryBudgetError,
    source: StepSource,
    method: AnyMethod,
    num_layers: int,
    log: PlanningLog,
) -> MemoryBudgetError:
    """The error of a method for one mesh. `num_layers`: those that recomputation could free."""
    useless = set()
    number = getattr(method, "num_micro_batches", 1)
    name = type(method).__name__
    given = f"{name}(num_micro_batches={number})"
    batch = f"{number} of them, as {given} asks for" if number > 1 else f"not tried: {given}"
    if error.num_micro_batches is not None:
        reason = why_not_cut(
            lambda more: source.with_recomputation((), more), error.num_micro_batches, log
        )
        if reason is not None:
            useless.add(MICRO_BATCHES)
            batch += f"; {error.num_micro_batches} are not possible: {reason}"
    tried = {
        MICRO_BATCHES: batch,
        RECOMPUTATION: recomputation_tried(options_of(method).remat, num_layers, error),
        PIPELINES: f"not tried: {name} plans for one mesh; AutoParallel() compares both",
    }
    return error.having_tried(tried, useless=useless)


def recomputation_tried(remat: str, num_layers: int, error: MemoryBudgetError) -> str:
    if remat == "none":
        return 'not tried: ShardingOptions(remat="none")'
    if not num_layers:
        return "not tried: it would free nothing of any layer"
    layers = f"all {num_layers} layers whose activations it frees" if num_layers > 1 else "a layer"
    return f"tried: the smallest peak, {format_bytes(error.peak_bytes)}, recomputes {layers}"


def _failed(failure: Failure) -> str:
    return f"autopar failed, {failure.exception}"
