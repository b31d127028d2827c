"""A call of the user's step, flattened (`FlatCall`), and the step traced for it (`TracedStep`).

`tracer.flat_call` makes the first, `tracer.trace_step` the second; `rewrite` turns one traced step
into another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.core import ShapedArray
from jax.tree_util import keystr, tree_unflatten

from autopar.ir.host_memory import HostCut
from autopar.ir.program import Program

KeyPath = tuple[Any, ...]  # keys of jax.tree_util


@dataclass(frozen=True)
class StaticLeaf:
    """A leaf that is not an array, compared by value if possible, else by identity."""

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


# Static leaves with their positions among all leaves of a pytree.
StaticLeaves = tuple[tuple[int, StaticLeaf], ...]


@dataclass(frozen=True)
class FlatCall:
    """The arguments of one call: array leaves apart from everything else."""

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    argument: tuple[int | str, ...]  # which argument each leaf belongs to
    key_paths: tuple[KeyPath, ...]  # path of each leaf inside its argument
    treedef: Any  # jax.tree_util.PyTreeDef
    static: StaticLeaves
    static_args: tuple[tuple[int, Any], ...]
    in_objects: frozenset[int] = frozenset()  # leaves that belong to nnx objects

    def names_of(self, inputs: Iterable[int]) -> tuple[str, ...]:
        """The user's names of the arguments that hold these leaves, each once."""
        names = (self.paths[i].removesuffix(keystr(self.key_paths[i])) for i in inputs)
        return tuple(dict.fromkeys(names))

    def arrays_among(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """The array leaves of another call with this structure; None if a static leaf differs."""
        if not self.static:
            return leaves
        positions = dict(self.static)
        if any(leaf != StaticLeaf(leaves[i]) for i, leaf in positions.items()):
            return None
        return [leaf for i, leaf in enumerate(leaves) if i not in positions]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the user's function, with `leaves` as its array leaves."""
        args, kwargs = tree_unflatten(self.treedef, _with_static(leaves, self.static))
        args = list(args)
        for position, value in self.static_args:
            args.insert(position, value)
        return tuple(args), kwargs


@dataclass(frozen=True)
class TracedStep:
    """A train step as a flat program, with the user's names for its inputs and outputs."""

    program: Program
    call: FlatCall
    avals: tuple[ShapedArray, ...]  # of the inputs
    out_paths: tuple[str, ...]
    out_avals: tuple[ShapedArray, ...]
    out_tree: Any  # jax.tree_util.PyTreeDef
    out_static: StaticLeaves
    state: tuple[tuple[int, int], ...]  # (input, output) indices
    batch: tuple[int, ...]  # input indices
    donated: tuple[int, ...]  # input indices
    name: str
    flat_fn: Callable[..., list[Any]]  # the user's function on array leaves, not rewritten
    num_micro_batches: int = 1
    notes: tuple[str, ...] = ()  # warnings for the plan to show
    remat: tuple[str, ...] = ()  # layers that the backward pass recomputes
    is_thinned: bool = False  # its scans stack less than those that were traced
    is_unrolled: bool = False  # its scans over layers are written out
    is_reordered: bool = False  # its products transpose smaller arrays than those that were traced
    loop: int | None = None  # the equation that is the loop over micro-batches
    is_stage: bool = False  # of a pipeline: its loop's body is run as programs of their own
    backward: tuple[int, ...] = ()  # equations of that body that the stage's backward program runs
    host: HostCut | None = None  # state in host memory, and the equations that update it

    def with_program(self, program: Program, **changes: Any) -> TracedStep:
        """With a rewritten program, whose equations may have other indices."""
        loop = self.loop
        if loop is not None:
            results = self.program.equations[loop].results
            loop = next(i for i, e in enumerate(program.equations) if e.results == results)
        return replace(self, program=program, loop=loop, **changes)

    def with_loop_body(self, body: Program, **changes: Any) -> TracedStep:
        """With a rewritten body of the loop over micro-batches; its avals become the program's."""
        program, at = self.program, self.loop
        assert at is not None
        loop = replace(program.equations[at], bodies=(body,))
        equations = (*program.equations[:at], loop, *program.equations[at + 1 :])
        program = replace(program, equations=equations, avals=body.avals)
        return replace(self, program=program, **changes)

    def rebuild_output(self, leaves: Sequence[Any]) -> Any:
        """The step's result, with `leaves` as its array leaves."""
        return tree_unflatten(self.out_tree, _with_static(leaves, self.out_static))


def _with_static(arrays: Sequence[Any], static_leaves: StaticLeaves) -> Sequence[Any]:
    """All leaves of a pytree, from its array leaves and its static ones."""
    if not static_leaves:
        return arrays
    static, rest = dict(static_leaves), iter(arrays)
    total = len(arrays) + len(static)
    return [static[i].value if i in static else next(rest) for i in range(total)]
