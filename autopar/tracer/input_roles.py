"""Which inputs of a step are state or donated: from a `Program` and its call to indices.

*State* is found, not declared: an argument is state if its pytree returns in the result, leaf for
leaf, and most leaves are updated elementwise, as optimizers do, outside of any backward pass. An
argument that the user donates may be updated in any way (a cache into which rows are written). A
state's inputs and outputs share one spec. If the program takes a gradient it is a train step, and
the state that it updates is donated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.core import ShapedArray

from autopar import _jax
from autopar.errors import ArgumentError
from autopar.ir.program import Equation, Operand, Program
from autopar.ir.traced_step import FlatCall, KeyPath
from autopar.tracer.regions import BACKWARD, region_by_name

# What optimizers do to a parameter or a moment on its way to the next step.
_UPDATES = {
    "add", "sub", "mul", "div", "add_any", "neg", "convert_element_type", "select_n", "max", "min",
    "copy", "clamp", "pow", "integer_pow", "square", "sqrt", "rsqrt", "random_wrap",
    "random_unwrap", "reshape", "squeeze", "expand_dims", "optimization_barrier",
    "sharding_constraint", "copy_p", _jax.CONSTRAIN,
}  # fmt: skip


def match_state(
    program: Program,
    call: FlatCall,
    out_avals: Sequence[ShapedArray],
    *,
    out_key_paths: Sequence[KeyPath],
    batch_argnums: Sequence[int] | str,
    donate_argnums: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """The state as (input, output) indices."""
    in_avals = [program.avals[v] for v in program.inputs]
    batch_argnums = (1,) if isinstance(batch_argnums, str) else batch_argnums
    by_path = {path: index for index, path in enumerate(out_key_paths)}
    edges: dict[int, set[int]] = {}
    for source, target in _update_edges(program):
        if isinstance(source, int) and isinstance(target, int):
            edges.setdefault(source, set()).add(target)
    matched: set[int] = set()
    state: list[tuple[int, int]] = []
    for owner in dict.fromkeys(call.argument):
        inputs = [i for i, a in enumerate(call.argument) if a == owner]
        if len(inputs) == 1 and owner in batch_argnums and not call.in_objects & set(inputs):
            continue  # a single array in the batch's position is the batch, whatever returns
        for prefix in _prefixes(out_key_paths, call.key_paths[inputs[0]]):
            outputs = [by_path.get(prefix + call.key_paths[i]) for i in inputs]
            pairs = [(i, o) for i, o in zip(inputs, outputs, strict=True) if o is not None]
            if len(pairs) < len(inputs) or any(o in matched for _, o in pairs):
                continue
            if not all(_same_array(in_avals[i], out_avals[o]) for i, o in pairs):
                continue
            updated = sum(_reaches(edges, program.inputs[i], program.outputs[o]) for i, o in pairs)
            if owner not in donate_argnums and 2 * updated < len(pairs):
                continue
            state += pairs
            matched.update(o for _, o in pairs)
            break
    return tuple(sorted(state))


def _prefixes(paths: Sequence[KeyPath], suffix: KeyPath) -> list[KeyPath]:
    """What comes before the suffix in each of the paths that end with it."""
    starts = ((path, len(path) - len(suffix)) for path in paths)
    return [path[:start] for path, start in starts if start >= 0 and path[start:] == suffix]


def _same_array(a: ShapedArray, b: ShapedArray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _update_edges(program: Program) -> Iterator[tuple[Operand, Operand]]:
    """(value, value of the same shape computed from it elementwise, or passed into or out of a
    loop).

    The backward pass has no updates: the gradient of a squared norm is elementwise in the
    parameters too. The forward pass may have some, such as batch statistics.
    """
    avals = program.avals
    for equation in program.all_equations():
        if equation.bodies:
            yield from _loop_edges(equation)
        elif equation.name in _UPDATES and region_by_name(equation.scope) != BACKWARD:
            for value in equation.inputs:
                for result in equation.results:
                    if avals[value].shape == avals[result].shape:
                        yield value, result


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
    """Whether elementwise updates, as an optimizer makes them, lead from start to target."""
    if not isinstance(target, int):
        return False
    reached, frontier = {start}, [start]
    while frontier and target not in reached:
        for value in edges.get(frontier.pop(), ()):
            if value not in reached:
                reached.add(value)
                frontier.append(value)
    return target in reached


def donated_inputs(
    call: FlatCall,
    program: Program,
    num_args: int,
    state: Sequence[tuple[int, int]],
    donate_argnums: Sequence[int] | str,
) -> tuple[int, ...]:
    if donate_argnums == "auto":
        if not any(region_by_name(e.scope) == BACKWARD for e in program.all_equations()):
            return ()
        # An input that is returned unchanged keeps its buffer.
        return tuple(i for i, o in state if program.outputs[o] != program.inputs[i])
    if isinstance(donate_argnums, str) or not all(isinstance(n, int) for n in donate_argnums):
        raise ArgumentError(
            f"donate_argnums={donate_argnums!r}: needs 'auto' or a tuple of argument positions."
        )
    wrong = [n for n in donate_argnums if not 0 <= n < num_args]
    if wrong:
        raise ArgumentError(
            f"donate_argnums={tuple(donate_argnums)} names argument {wrong[0]}, but the call gave "
            f"{num_args} positional arguments."
        )
    return tuple(i for i, a in enumerate(call.argument) if a in set(donate_argnums))
