"""From a user's function and arguments to a flat program of arrays.

Arguments may be any pytrees. Leaves that are arrays (or scalars) become inputs; every other leaf
(a function, a text) is static: part of the program's identity, never traced. In a call with an
equinox module scalars of Python are static too, as `eqx.filter_jit` has it. Objects of nnx are
taken apart (see `autopar.ir.objects`). Inputs and outputs are named by their path as the user would
write it, `state.params['Dense_0']['kernel']`.

*State* is found, not declared: an argument whose pytree comes back in the result, leaf for leaf,
most of it updated elementwise as optimizers do, outside of any backward pass; or updated in
whatever way, if the user donates it (a cache into which rows are written). Its inputs and outputs
share one spec. If the program takes a gradient it is a train step, and the state that it updates is
donated.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.errors import JAXTypeError
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from autopar import _jax
from autopar.errors import ArgumentError, TraceError
from autopar.ir import objects
from autopar.tracer.program import Equation, Operand, Program, flatten_jaxpr
from autopar.tracer.regions import BACKWARD, region_by_name

# What optimizers do to a parameter or a moment on its way to the next step.
_UPDATES = {
    "add", "sub", "mul", "div", "add_any", "neg", "convert_element_type", "select_n", "max", "min",
    "copy", "clamp", "pow", "integer_pow", "square", "sqrt", "rsqrt", "random_wrap",
    "random_unwrap", "reshape", "squeeze", "expand_dims", "optimization_barrier",
    "sharding_constraint", "copy_p", _jax.CONSTRAIN,
}  # fmt: skip


@dataclass(frozen=True)
class StaticLeaf:
    """A leaf that is not an array, compared by value where it can be, else by identity."""

    value: Any

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf):
            return NotImplemented
        if self.value is other.value:
            return True
        try:
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        except Exception:  # a user's __eq__ may raise; then the leaves differ
            return False


@dataclass(frozen=True)
class FlatCall:
    """One call's arguments: array leaves apart from everything else."""

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    argument: tuple[int | str, ...]  # which argument each leaf belongs to
    key_paths: tuple[tuple[Any, ...], ...]  # path of each leaf inside its argument
    treedef: Any
    static: tuple[tuple[int, StaticLeaf], ...]  # (position among all leaves, leaf)
    static_args: tuple[tuple[int, Any], ...]
    in_objects: frozenset[int] = frozenset()  # leaves that objects of nnx hold

    def arrays_among(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """The array leaves of another call of this structure; None if a static leaf differs."""
        if not self.static:
            return leaves
        positions = dict(self.static)
        if any(leaf != StaticLeaf(leaves[i]) for i, leaf in positions.items()):
            return None
        return [leaf for i, leaf in enumerate(leaves) if i not in positions]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the user's function with other values for the array leaves."""
        everything: list[Any] = []
        static, dynamic = dict(self.static), iter(leaves)
        for position in range(len(leaves) + len(self.static)):
            is_static = position in static
            everything.append(static[position].value if is_static else next(dynamic))
        args, kwargs = tree_unflatten(self.treedef, everything)
        args = list(args)
        for position, value in self.static_args:
            args.insert(position, value)
        return tuple(args), kwargs


def is_array_leaf(leaf: Any) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def flatten_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int] = (),
) -> FlatCall:
    for position in static_argnums:
        if not 0 <= position < len(args):
            raise ArgumentError(
                f"static_argnums={tuple(static_argnums)} names argument {position}, but the call "
                f"gave {len(args)} positional arguments. Give positions 0 to {len(args) - 1}."
            )
    apart = objects.taken_apart(args, kwargs, static_argnums)
    args, kwargs = apart.args, apart.kwargs
    static_args = tuple((i, args[i]) for i in sorted(static_argnums))
    for position, value in static_args:
        try:
            hash(value)
        except TypeError as error:
            raise ArgumentError(
                f"static_argnums={tuple(static_argnums)}: argument {position} is a "
                f"{type(value).__name__}, which cannot be hashed. Static arguments are compared "
                "between calls: pass a hashable value such as a number, string or tuple."
            ) from error
    dynamic = [(i, a) for i, a in enumerate(args) if i not in set(static_argnums)]
    names = argument_names(fn)
    tree = (tuple(a for _, a in dynamic), kwargs)
    flat, treedef = tree_flatten_with_path(tree)
    in_nodes = objects.leaves_in_nodes(tree)
    is_filtered = objects.is_filtered(tree)
    is_input = objects.is_array if is_filtered else is_array_leaf
    leaves, paths, owners, key_paths, static, in_objects = [], [], [], [], [], set()
    for position, (path, leaf) in enumerate(flat):
        if path[0].idx == 0:
            owner = dynamic[path[1].idx][0]
            name = names[owner] if owner < len(names) else f"args[{owner}]"
        else:
            owner = name = path[1].key
        if not is_input(leaf):
            static.append((position, StaticLeaf(leaf)))
            continue
        if position in in_nodes:
            in_objects.add(len(leaves))
        leaves.append(leaf)
        paths.append(name + keystr(path[2:]))
        owners.append(owner)
        key_paths.append(tuple(path[2:]))
    return FlatCall(
        tuple(leaves),
        tuple(paths),
        tuple(owners),
        tuple(key_paths),
        treedef,
        tuple(static),
        static_args,
        frozenset(in_objects),
    )


def argument_names(fn: Callable[..., Any]) -> list[str]:
    """The user's own names of the positional arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some callables tell nothing
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional]


@dataclass(frozen=True)
class TracedStep:
    """A train step as a flat program, with the user's names for everything that enters and
    leaves it."""

    program: Program
    call: FlatCall
    avals: tuple[Any, ...]  # of the inputs
    out_paths: tuple[str, ...]
    out_avals: tuple[Any, ...]
    out_tree: Any
    out_static: tuple[tuple[int, StaticLeaf], ...]
    state: tuple[tuple[int, int], ...]  # (input, output) indices
    batch: tuple[int, ...]  # input indices
    donated: tuple[int, ...]  # input indices
    name: str
    flat_fn: Callable[..., list[Any]]  # the user's function on array leaves, as it is
    num_micro_batches: int = 1
    notes: tuple[str, ...] = ()  # what the plan is to warn of
    remat: tuple[str, ...] = ()  # layers that the program computes again in its backward pass
    loop: int | None = None  # the equation that is the loop over micro-batches

    def rebuild_output(self, leaves: Sequence[Any]) -> Any:
        if not self.out_static:
            return tree_unflatten(self.out_tree, leaves)
        static, dynamic = dict(self.out_static), iter(leaves)
        total = len(leaves) + len(self.out_static)
        everything = [static[i].value if i in static else next(dynamic) for i in range(total)]
        return tree_unflatten(self.out_tree, everything)


def _shape_of(leaf: Any) -> Any:
    """A leaf without the devices that it lies on: the program does not depend on them, and those
    of a pipeline's arrays are not even the same for all."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    is_weak = getattr(leaf, "weak_type", False)  # keys have none
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak)


def trace_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] | str = "auto",
    batch_argnums: Sequence[int] = (1,),
) -> TracedStep:
    call = flatten_call(fn, args, kwargs or {}, static_argnums)
    name = getattr(fn, "__name__", None) or type(fn).__name__
    if not call.leaves:
        raise TraceError(
            f"{name}: none of its arguments holds an array, so there is nothing to shard. Pass the "
            "train state and the batch as arguments instead of closing over them."
        )
    out: dict[str, Any] = {}

    def flat_fn(*leaves: Any) -> list[Any]:
        call_args, call_kwargs = call.rebuild(leaves)
        result = _jax.call_step(objects.run_pure, fn, call_args, call_kwargs)
        flat, tree = tree_flatten_with_path(result)
        is_filtered = objects.is_filtered((call_args, call_kwargs, result))
        is_output = objects.is_array if is_filtered else is_array_leaf
        dynamic, paths, key_paths, static = [], [], [], []
        for position, (path, leaf) in enumerate(flat):
            if is_output(leaf):
                dynamic.append(leaf)
                paths.append("result" + keystr(path))
                key_paths.append(tuple(path))
            else:
                static.append((position, StaticLeaf(leaf)))
        out.update(tree=tree, paths=paths, key_paths=key_paths, static=tuple(static))
        return dynamic

    flat_fn.__name__ = flat_fn.__qualname__ = name
    try:
        traced = jax.jit(flat_fn, keep_unused=True).trace(*map(_shape_of, call.leaves))
    except JAXTypeError as error:
        _name_leaves(error, call.paths)
        raise
    program = flatten_jaxpr(traced.jaxpr)
    _check_pure(program, name)
    avals = tuple(program.avals[v] for v in program.inputs)
    out_avals = tuple(program.avals[o] if isinstance(o, int) else o.aval for o in program.outputs)
    if not out_avals:
        raise TraceError(
            f"{name}: it returns no array. Return the new state and the loss so that the parallel "
            "step has something to give back."
        )
    given = () if isinstance(donate_argnums, str) else tuple(donate_argnums)
    state = _match_state(program, call, out["key_paths"], avals, out_avals, batch_argnums, given)
    return TracedStep(
        program=program,
        call=call,
        avals=avals,
        out_paths=tuple(out["paths"]),
        out_avals=out_avals,
        out_tree=out["tree"],
        out_static=out["static"],
        state=state,
        batch=_batch_inputs(call, avals, argument_names(fn), state, batch_argnums, name),
        donated=_donated_inputs(call, program, args, state, donate_argnums),
        name=name,
        flat_fn=flat_fn,
    )


def _name_leaves(error: Exception, paths: Sequence[str]) -> None:
    """JAX's errors speak of `leaves[3]`, as we call the function; the user knows another name."""
    named = dict.fromkeys(re.findall(r"\bleaves\[(\d+)\]", str(error)))
    known = [f"leaves[{i}] is {paths[int(i)]}" for i in named if int(i) < len(paths)]
    if known:
        error.add_note(f"Of the arguments that are meant, {', '.join(known)}.")


def _check_pure(program: Program, name: str) -> None:
    if not any(map(_jax.is_mutable, program.avals)):
        return
    for equation in program.equations:
        if any(_jax.is_mutable(program.avals[r]) for r in equation.results):
            raise TraceError(
                f"{name}: {equation.source_line} makes a mutable array (jax.new_ref), which cannot "
                "be sharded. Keep the value in a plain array and return the updated one."
            )
        for body in equation.bodies:
            _check_pure(body, name)


def _same_array(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _match_state(
    program: Program,
    call: FlatCall,
    out_key_paths: Sequence[tuple[Any, ...]],
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    batch_argnums: Sequence[int],
    donate_argnums: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    by_path = {path: index for index, path in enumerate(out_key_paths)}
    edges: dict[int, set[int]] = {}
    for source, target in _update_edges(program):
        if isinstance(source, int) and isinstance(target, int):
            edges.setdefault(source, set()).add(target)
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for owner in dict.fromkeys(call.argument):
        inputs = [i for i, a in enumerate(call.argument) if a == owner]
        if len(inputs) == 1 and owner in batch_argnums and not call.in_objects & set(inputs):
            continue  # one array where the batch is said to be is the batch, whatever comes back
        first = call.key_paths[inputs[0]]
        prefixes = [
            path[: len(path) - len(first)]
            for path in out_key_paths
            if len(path) >= len(first) and path[len(path) - len(first) :] == first
        ]
        for prefix in prefixes:
            outputs = [by_path.get(prefix + call.key_paths[i]) for i in inputs]
            found = [(i, o) for i, o in zip(inputs, outputs, strict=True) if o is not None]
            if len(found) < len(inputs) or any(o in taken for _, o in found):
                continue
            if not all(_same_array(in_avals[i], out_avals[o]) for i, o in found):
                continue
            updated = sum(_reaches(edges, program.inputs[i], program.outputs[o]) for i, o in found)
            if owner not in donate_argnums and 2 * updated < len(found):
                continue
            pairs += found
            taken.update(o for _, o in found)
            break
    return tuple(sorted(pairs))


def _update_edges(program: Program) -> Iterator[tuple[Operand, Operand]]:
    """(value, value of the same shape made from it elementwise, or passed in or out of a loop).

    What happens in a backward pass is no update: the gradient of a squared norm is made from the
    parameters elementwise too. In a forward pass, averages over batches are updated.
    """
    avals = program.avals
    for equation in program.equations:
        if equation.bodies:
            yield from _loop_edges(equation)
            for body in equation.bodies:
                yield from _update_edges(body)
        elif equation.name in _UPDATES and region_by_name(equation.scope) != BACKWARD:
            for operand in equation.operands:
                for result in equation.results:
                    if isinstance(operand, int) and avals[operand].shape == avals[result].shape:
                        yield operand, result


def _loop_edges(equation: Equation) -> Iterator[tuple[Operand, Operand]]:
    operands, results, bodies = equation.operands, equation.results, equation.bodies
    if equation.name == "cond":
        for branch in bodies:
            yield from zip(operands[1:], branch.inputs, strict=True)
            yield from zip(branch.outputs, results, strict=True)
        return
    if equation.name == "scan":
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        body, body_consts = bodies[0], num_consts
    else:
        body, body_consts = bodies[1], equation.params["body_nconsts"]
        num_consts = body_consts + equation.params["cond_nconsts"]
        num_carry = len(results)
    inits = operands[num_consts : num_consts + num_carry]
    yield from zip(
        operands[num_consts - body_consts : num_consts], body.inputs[:body_consts], strict=True
    )
    yield from zip(inits, body.inputs[body_consts : body_consts + num_carry], strict=True)
    yield from zip(inits, results[:num_carry], strict=True)
    yield from zip(body.outputs[:num_carry], results[:num_carry], strict=True)


def _reaches(edges: dict[int, set[int]], start: int, target: Operand) -> bool:
    """Whether the target is the start after elementwise changes, as an optimizer makes them."""
    if not isinstance(target, int):
        return False
    reached, frontier = {start}, [start]
    while frontier and target not in reached:
        for value in edges.get(frontier.pop(), ()):
            if value not in reached:
                reached.add(value)
                frontier.append(value)
    return target in reached


def _takes_gradient(program: Program) -> bool:
    return any(
        region_by_name(equation.scope) == BACKWARD or any(map(_takes_gradient, equation.bodies))
        for equation in program.equations
    )


def _batch_inputs(
    call: FlatCall,
    avals: Sequence[Any],
    names: Sequence[str],
    state: tuple[tuple[int, int], ...],
    batch_argnums: Sequence[int],
    name: str,
) -> tuple[int, ...]:
    given = set(call.argument)
    state_args = {call.argument[i] for i, _ in state}
    # An argument may have been given by its name.
    owners = [names[n] if n < len(names) and names[n] in given else n for n in batch_argnums]
    held = {call.argument[i] for i in call.in_objects}
    if tuple(batch_argnums) == (1,) and (owners[0] not in given or owners[0] in state_args | held):
        return _inferred_batch(call, avals, state_args) if state or call.in_objects else ()
    for position, owner in zip(batch_argnums, owners, strict=True):
        if owner not in given and position not in dict(call.static_args):
            path = names[position] if position < len(names) else f"args[{position}]"
            raise TraceError(
                f"{path} (batch_argnums={tuple(batch_argnums)}): the batch argument of {name} was "
                "not given, or holds no arrays. Pass arrays with a leading batch dimension, or set "
                "batch_argnums to the positions of the arguments that have them."
            )
    return tuple(i for i, owner in enumerate(call.argument) if owner in owners)


def _inferred_batch(
    call: FlatCall, avals: Sequence[Any], state_args: set[int | str]
) -> tuple[int, ...]:
    """The default where argument 1 is not the batch: arrays that are neither state nor held by
    objects, and as many rows as the first of them has (a random key among them has not)."""
    others = [
        i
        for i, owner in enumerate(call.argument)
        if owner not in state_args
        and i not in call.in_objects
        and avals[i].shape
        and not _jax.is_extended_dtype(avals[i].dtype)
    ]
    return tuple(i for i in others if avals[i].shape[0] == avals[others[0]].shape[0])


def _donated_inputs(
    call: FlatCall,
    program: Program,
    args: tuple[Any, ...],
    state: tuple[tuple[int, int], ...],
    donate_argnums: Sequence[int] | str,
) -> tuple[int, ...]:
    if donate_argnums == "auto":
        if not _takes_gradient(program):
            return ()
        # An input returned untouched keeps its buffer.
        return tuple(i for i, o in state if program.outputs[o] != program.inputs[i])
    if isinstance(donate_argnums, str) or not all(isinstance(n, int) for n in donate_argnums):
        raise ArgumentError(
            f"donate_argnums={donate_argnums!r}: needs 'auto' or a tuple of argument positions."
        )
    wrong = [n for n in donate_argnums if not 0 <= n < len(args)]
    if wrong:
        raise ArgumentError(
            f"donate_argnums={tuple(donate_argnums)} names argument {wrong[0]}, but the call gave "
            f"{len(args)} positional arguments."
        )
    return tuple(i for i, a in enumerate(call.argument) if a in set(donate_argnums))
