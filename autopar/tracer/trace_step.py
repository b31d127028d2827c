"""From a user's function and arguments to a `TracedStep`: a flat program of arrays.

JAX traces the function on array leaves (`flat_call`), `flatten` flattens the jaxpr, `input_roles`
finds out which inputs are state or donated, and `batch_arguments` which are batch. Outputs are
named by their path in the result, `result[0].params['w']`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import _jax
from autopar.errors import TraceError
from autopar.ir.objects.equinox_modules import has_equinox_module, is_array
from autopar.ir.objects.nnx import run_pure
from autopar.ir.program import Program
from autopar.ir.traced_step import FlatCall, KeyPath, StaticLeaf, StaticLeaves, TracedStep
from autopar.tracer.batch_arguments import AUTO, batch_inputs, is_returned
from autopar.tracer.flat_call import argument_names, flatten_call, is_array_leaf
from autopar.tracer.flatten import flatten_jaxpr
from autopar.tracer.input_roles import donated_inputs, match_state
from autopar.tracer.jax_settings import within_users_mesh
from autopar.tracer.users_names import use_users_names


def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] | str = "auto",
    batch_argnums: Sequence[int] | str = AUTO,
    batch: tuple[int, ...] | None = None,
) -> TracedStep:
    """`batch`: the inputs that are the batch, if known; `batch_argnums` are then ignored."""
    call = flatten_call(fn, args, kwargs or {}, static_argnums)
    name = getattr(fn, "__name__", None) or type(fn).__name__
    if not call.leaves:
        raise TraceError(
            f"{name}: none of its arguments holds an array, so there is nothing to shard. Pass the "
            "train state and the batch as arguments instead of closing over them."
        )
    program, flat_fn, result = _trace(fn, call, name)
    _check_pure(program, name)
    avals = tuple(program.avals[v] for v in program.inputs)
    out_avals = tuple(program.avals[o] if isinstance(o, int) else o.aval for o in program.outputs)
    if not out_avals:
        raise TraceError(
            f"{name}: it returns no array. Return the new state and the loss so that the parallel "
            "step has something to give back."
        )
    state = match_state(
        program,
        call,
        out_avals,
        out_key_paths=result.key_paths,
        batch_argnums=batch_argnums,
        donate_argnums=() if isinstance(donate_argnums, str) else tuple(donate_argnums),
    )
    step = TracedStep(
        program=program,
        call=call,
        avals=avals,
        out_paths=tuple("result" + keystr(path) for path in result.key_paths),
        out_avals=out_avals,
        out_tree=result.treedef,
        out_static=result.static,
        state=state,
        batch=(),
        donated=(),
        name=name,
        flat_fn=flat_fn,
    )
    if batch is None:
        batch = batch_inputs(step, argument_names(fn), batch_argnums)
    state = _state_beside(step, batch, donate_argnums)
    donated = donated_inputs(call, program, len(args), state, donate_argnums)
    return replace(step, batch=batch, state=state, donated=donated)


def _state_beside(
    step: TracedStep, batch: Sequence[int], donate_argnums: Sequence[int] | str
) -> tuple[tuple[int, int], ...]:
    """The state without the batch: one that returns changed is not the state of the next step,
    unless the caller gives it up."""
    given_up = () if isinstance(donate_argnums, str) else tuple(donate_argnums)

    def is_kept(index: int, output: int) -> bool:
        if index not in batch:
            return True
        return step.call.argument[index] in given_up and not is_returned(step, index, output)

    return tuple(pair for pair in step.state if is_kept(*pair))


@dataclass(frozen=True)
class _ResultTree:
    """The structure of a step's result, without its array leaves."""

    treedef: Any  # jax.tree_util.PyTreeDef
    key_paths: tuple[KeyPath, ...]  # of the array leaves
    static: StaticLeaves


def _trace(
    fn: Callable[..., Any], call: FlatCall, name: str
) -> tuple[Program, Callable[..., list[Any]], _ResultTree]:
    """The program, the function on array leaves that it was traced from, and its result's tree."""
    result: _ResultTree | None = None

    def flat_fn(*leaves: Any) -> list[Any]:
        nonlocal result
        with _jax.kernels_of_absent_gpus():
            arrays, result = _call_on_leaves(fn, call, leaves)
        return arrays

    flat_fn.__name__ = flat_fn.__qualname__ = name
    try:
        with within_users_mesh():
            traced = jax.jit(flat_fn, keep_unused=True).trace(*map(_shape_of, call.leaves))
    except Exception as error:
        use_users_names(error, call.paths, flat_fn, fn)
        raise
    assert result is not None
    return flatten_jaxpr(traced.jaxpr), flat_fn, result


def _call_on_leaves(
    fn: Callable[..., Any], call: FlatCall, leaves: Sequence[Any]
) -> tuple[list[Any], _ResultTree]:
    args, kwargs = call.rebuild(leaves)
    result = _jax.call_step(run_pure, fn, args, kwargs)
    flat, treedef = tree_flatten_with_path(result)
    is_filtered = has_equinox_module((args, kwargs, result))
    is_output = is_array if is_filtered else is_array_leaf
    outputs = [(tuple(path), leaf) for path, leaf in flat if is_output(leaf)]
    static = tuple((i, StaticLeaf(leaf)) for i, (_, leaf) in enumerate(flat) if not is_output(leaf))
    key_paths = tuple(path for path, _ in outputs)
    return [leaf for _, leaf in outputs], _ResultTree(treedef, key_paths, static)


def _shape_of(leaf: Any) -> Any:
    """A leaf without its devices: the program does not depend on them, and the arrays of a pipeline
    are on different ones."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    is_weak = getattr(leaf, "weak_type", False)  # keys have none
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak)


def _check_pure(program: Program, name: str) -> None:
    if not any(map(_jax.is_mutable, program.avals)):
        return
    for equation in program.all_equations():
        if any(_jax.is_mutable(program.avals[r]) for r in equation.results):
            raise TraceError(
                f"{name}: {equation.source_line} makes a mutable array (jax.new_ref), which cannot "
                "be sharded. Keep the value in a plain array and return the updated one."
            )
