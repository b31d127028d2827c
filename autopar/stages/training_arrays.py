"""Which arrays of a function beside training are the train step's: from both calls to `Tensor`s.

state_of_training       what an initialiser returns, as the train step takes it
arguments_of_training   arguments of an evaluation that the train step has too
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr

from autopar.errors import ArgumentError, shortened
from autopar.ir.objects.nnx import has_objects, merge_objects
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.traced_step import FlatCall, TracedStep
from autopar.methods import CreateStateParallel, FollowParallel

# -- initialisers


def state_of_training(
    traced: TracedStep, method: CreateStateParallel
) -> tuple[ParallelPlan, tuple[Tensor, ...]]:
    """(the train step's plan, its input for each of the initialiser's results): the step is planned
    for the state that the initialiser was seen to return."""
    leaves = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in traced.out_avals
    ]
    state = merge_objects(traced.rebuild_output(leaves))
    args, positions = _arguments(method, state)
    try:
        train = method.train_step.planned_to_fit(args, {})
    except Exception as error:
        error.add_note(
            f"autopar: while planning the train step of CreateStateParallel with what "
            f"{traced.name} returns as argument {' and '.join(map(str, positions))} and the batch "
            "that was given."
        )
        raise
    plan, owners = train.plan, train.traced.call.argument
    tensors = tuple(
        tensor
        for position in positions
        for tensor, owner in zip(plan.inputs, owners, strict=True)
        if owner == position
    )
    assert len(tensors) == len(leaves), (len(tensors), len(leaves))
    return plan, tensors


def _arguments(method: CreateStateParallel, state: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """(arguments of the train step, which of them are the state): the state is the first that is
    neither batch nor static. A tuple may be several arguments, which come first, or at all places
    that are neither if `batch_argnums` was given."""
    step, batch = method.train_step, method.batch
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # some callables tell nothing
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    num_needed = sum(p.default is inspect.Parameter.empty for p in positional)
    num_states = len(state) if type(state) is tuple else 1

    def rest_beside(num_states: int) -> list[Any] | None:
        needed = num_needed - num_states
        if num_states > 1 and needed < 0:
            return None
        if needed <= 1:
            return [batch]
        fits = isinstance(batch, tuple) and needed <= len(batch) <= len(positional) - num_states
        return list(batch) if fits else None

    counts = [1, num_states] if num_states > 1 and num_needed > 2 else [1]
    if has_objects(state):
        counts.reverse()
    candidates = ((count, rest_beside(count)) for count in counts)
    count, rest = next(((c, r) for c, r in candidates if r is not None), (1, None))
    if rest is None:
        raise ArgumentError(
            f"CreateStateParallel(batch={shortened(batch)}): {step!r} takes {num_needed - 1} "
            "arguments beside the state. Give a tuple with a value (or a jax.ShapeDtypeStruct) for "
            "each of them, in their order, as the batch."
        )
    given = step.options.batch_argnums
    default = (1,) if count == 1 else ()
    taken = {*(default if isinstance(given, str) else given), *step.options.static_argnums}
    states = list(state) if count > 1 else [state]
    total = len(rest) + count
    free = [i for i in range(total) if i not in taken]
    positions = tuple(sorted([*free, *(i for i in range(total)[::-1] if i in taken)][:count]))
    for position, argument in zip(positions, states, strict=True):
        rest.insert(position, argument)
    return tuple(rest), positions


# -- evaluations


@dataclass(frozen=True)
class _Placed:
    """An array of the train step, by the names on its path: `('state', 'params', 'w')`."""

    names: tuple[str, ...]
    tensor: Tensor


def arguments_of_training(
    traced: TracedStep, method: FollowParallel
) -> tuple[ParallelPlan, dict[int, Tensor]]:
    """(the train step's plan, its input for those of the evaluation's that it has too)."""
    train = method.train_step.last_planned
    if train is None:
        raise ArgumentError(
            f"FollowParallel({method.train_step!r}): this step has no plan yet that {traced.name} "
            "could follow. Call the step first, or its plan(state, batch)."
        )
    plan = train.plan
    names = _names(train.traced.call)
    known = [_Placed(name, tensor) for name, tensor in zip(names, plan.inputs, strict=True)]
    matches: dict[int, Tensor] = {}
    for index, name in enumerate(_names(traced.call)):
        match = _best_match(name, tuple(traced.avals[index].shape), known)
        if match is not None:
            matches[index] = match.tensor
    if not any(tensor.role != "batch" for tensor in matches.values()):
        raise ArgumentError(
            f"FollowParallel: no array of {traced.name}'s arguments has the name and shape of one "
            f"of {plan.name}'s, such as {plan.inputs[0].path} {plan.inputs[0].shape}. Pass the "
            "train state or its parameters, or use ShardParallel."
        )
    return plan, matches


def _names(call: FlatCall) -> list[tuple[str, ...]]:
    """Argument name and keys of every leaf, whether they are attributes, dict keys or indices."""
    names = []
    for path, keys in zip(call.paths, call.key_paths, strict=True):
        argument = path[: len(path) - len(keystr(keys))]
        names.append((argument, *map(_key_name, keys)))
    return names


def _key_name(key: Any) -> str:
    return next(str(getattr(key, a)) for a in ("key", "name", "idx") if hasattr(key, a))


def _best_match(
    names: tuple[str, ...], shape: tuple[int, ...], known: Sequence[_Placed]
) -> _Placed | None:
    """The array of the train step with this shape and the most of these names at the end of its
    path: all but the argument's, at least, or all of its own."""
    best, best_score = None, (0, 0)
    for other in known:
        if other.tensor.shape != shape:
            continue
        common = 0
        for a, b in zip(reversed(names), reversed(other.names), strict=False):
            if a != b:
                break
            common += 1
        if common < max(1, min(len(names), len(other.names)) - 1):
            continue
        score = (common, -abs(len(names) - len(other.names)))
        if best is None or score > best_score:
            best, best_score = other, score
    return best
