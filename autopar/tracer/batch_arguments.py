"""Which arrays of a call are the batch: from a `TracedStep` without a batch to indices of inputs.

`batch_argnums` names the arguments, and then nothing is searched. Otherwise the batch is argument 1
and every other argument with as many rows that goes along with it. State, which returns updated,
and objects that the step updates in place are never batch; nor is argument 0 of a function that
returns no state. An argument 1 that the step returns beside state, as it came or changed row by row
(scaled images), is batch if no other argument may be: it returns as it came, or its arrays have as
many rows, which nothing ties to the other state.

The number of rows does not tell a label from a table that happens to be as long as the batch, but
the traced operators do. Dimensions that an operator can only split together are tied. Other rows

    are batch    if they are tied to the batch's rows (labels beside predictions), or if nothing
                 ties them to anything else (texts of a contrastive loss, related to all images);
    are none     if they are tied to a dimension of the state or to another one of the batch (a
                 table of positions, a mask), or if an operator needs all of them at once, and not
                 all of the batch's (a table that is indexed).

An argument whose arrays have different numbers of rows (the parameters of a teacher) gives only the
arrays that are tied to the batch. If argument 1 is such an argument, or a product in the forward
pass sums over its rows, and a later one is not, then the later one is the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar import _jax
from autopar.errors import TraceError
from autopar.ir.graph import Node, NodeKind, Value
from autopar.ir.traced_step import TracedStep
from autopar.tracer.build import build_nodes
from autopar.tracer.regions import FORWARD

AUTO = "auto"
_KEY_WORDS = (2, 4)  # of a raw random key, threefry's and rbg's


def batch_inputs(
    step: TracedStep, argument_names: Sequence[str], batch_argnums: Sequence[int] | str
) -> tuple[int, ...]:
    """The inputs that are the batch. `argument_names`: of the positional arguments."""
    arguments = set(step.call.argument)

    def owner(position: int) -> int | str:
        """An argument may have been passed by name."""
        named = argument_names[position] if position < len(argument_names) else None
        return named if named in arguments and named is not None else position

    if isinstance(batch_argnums, str):
        return _found_batch(step, owner(0), owner(1))
    owners = [owner(position) for position in batch_argnums]
    for position, one in zip(batch_argnums, owners, strict=True):
        if one not in arguments and position not in dict(step.call.static_args):
            is_named = position < len(argument_names)
            path = argument_names[position] if is_named else f"args[{position}]"
            raise TraceError(
                f"{path} (batch_argnums={tuple(batch_argnums)}): the batch argument of {step.name} "
                "was not given, or holds no arrays. Pass arrays with a leading batch dimension, or "
                "set batch_argnums to the positions of the arguments that have them."
            )
    return tuple(i for i, one in enumerate(step.call.argument) if one in owners)


def _found_batch(step: TracedStep, zeroth: int | str, first: int | str) -> tuple[int, ...]:
    rows = _rows_by_argument(step)
    if not step.state and not step.call.in_objects:
        rows.pop(zeroth, None)
        if first not in step.call.argument:
            return ()
    if first in rows:
        rows = {first: rows[first], **rows}
    if not rows:
        return _returned_batch(step, first) or _leaves_of(step, first)
    anchor = next(iter(rows))
    if len(rows) == 1:
        return _of_anchor(step, rows, anchor, first)
    ties = _Ties(*build_nodes(step))
    anchor = _anchor(step, rows, ties)
    found = _of_anchor(step, rows, anchor, first)
    others = [i for owner in rows if owner != anchor for i in rows[owner]]
    extra = [i for i in others if _goes_along(step, rows, i, found, ties)]
    return tuple(sorted({*found, *extra}))


def _rows_by_argument(step: TracedStep) -> dict[int | str, list[int]]:
    """{argument that is not state: its inputs that have rows}."""
    call = step.call
    state = {call.argument[i] for i, _ in step.state}
    found: dict[int | str, list[int]] = {}
    for index, owner in enumerate(call.argument):
        aval = step.avals[index]
        is_key = _jax.is_extended_dtype(aval.dtype) or (
            str(aval.dtype) == "uint32" and aval.ndim == 1 and aval.shape[0] in _KEY_WORDS
        )
        if owner not in state and index not in call.in_objects and aval.shape and not is_key:
            found.setdefault(owner, []).append(index)
    return found


def is_returned(step: TracedStep, index: int, output: int) -> bool:
    """Whether an input is a result of the step as it came."""
    return step.program.outputs[output] == step.program.inputs[index]


def _returned_batch(step: TracedStep, owner: int | str) -> tuple[int, ...]:
    """The arrays of an argument that looks like state only since the step returns it."""
    own = [pair for pair in step.state if step.call.argument[pair[0]] == owner]
    others = [i for i, _ in step.state if step.call.argument[i] != owner]
    if not own or not others:
        return ()
    if not all(is_returned(step, *pair) for pair in own):
        shapes = [step.avals[i].shape for i, _ in own]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            return ()
        ties, inputs = _Ties(*build_nodes(step)), step.program.inputs
        beside = [inputs[i] for i in others]
        if any(ties.is_tied_to(inputs[i], beside) for i, _ in own):
            return ()  # moments beside parameters
    return tuple(i for i, _ in own)


def _leaves_of(step: TracedStep, owner: int | str) -> tuple[int, ...]:
    """All inputs of an argument that is neither state nor held by objects."""
    call = step.call
    taken = {call.argument[i] for i in (*(i for i, _ in step.state), *call.in_objects)}
    return tuple(i for i, one in enumerate(call.argument) if one == owner and owner not in taken)


def _of_anchor(
    step: TracedStep, rows: dict[int | str, list[int]], anchor: int | str, first: int | str
) -> tuple[int, ...]:
    """Argument 1 is batch with all it holds; another argument with the arrays that have as many
    rows as its first, as are other arguments if none of them can be told apart."""
    if anchor == first:
        return _leaves_of(step, anchor)
    size = step.avals[rows[anchor][0]].shape[0]
    return tuple(i for i in rows[anchor] if step.avals[i].shape[0] == size)


def _anchor(step: TracedStep, rows: dict[int | str, list[int]], ties: _Ties) -> int | str:
    """The argument that surely is batch: the first, unless it looks like parameters and another
    one does not."""
    inputs = step.program.inputs

    def is_uneven(owner: int | str) -> bool:
        return len({step.avals[i].shape[0] for i in rows[owner]}) > 1

    def is_summed(owner: int | str) -> bool:
        return any(ties.is_summed(inputs[i]) for i in rows[owner])

    first, *others = rows
    if not is_uneven(first) and not is_summed(first):
        return first
    state = [inputs[i] for i, _ in step.state]
    for owner in others:
        beside = [inputs[i] for other in rows if other != owner for i in rows[other]]
        own = [inputs[i] for i in rows[owner]]
        if is_uneven(owner) or is_summed(owner):
            continue
        if not any(ties.needs_whole(v) or ties.is_tied_to(v, [*state, *beside]) for v in own):
            return owner
    return first


def _goes_along(
    step: TracedStep,
    rows: dict[int | str, list[int]],
    index: int,
    found: Sequence[int],
    ties: _Ties,
) -> bool:
    """Whether the rows of an input are the batch's (see above)."""
    inputs, avals = step.program.inputs, step.avals
    batch = [i for i in found if avals[i].shape]
    size = avals[index].shape[0]
    if all(avals[i].shape[0] != size for i in batch):
        return False
    value = inputs[index]
    if any(ties.are_tied(value, inputs[i]) for i in batch):
        return True
    argument = rows[step.call.argument[index]]
    if any(avals[i].shape[0] != size for i in argument):
        return False
    values = [inputs[i] for i in batch]
    is_tied = ties.is_tied_to(value, [inputs[i] for i, _ in step.state])
    return not (is_tied or ties.is_tied_to(value, values, 1) or ties.needs_whole(value, values))


# -- ties between dimensions

_Key = tuple[bool, int, int]  # whether of a node, value or node, dimension or factor


@dataclass
class _Ties:
    """Dimensions that are split together, as a union-find over dimensions of values and factors of
    nodes."""

    nodes: Sequence[Node]
    values: Sequence[Value]
    parent: dict[_Key, _Key] = field(default_factory=dict)
    whole: dict[_Key, set[int]] = field(default_factory=dict)  # dimensions -> nodes needing all
    summed: set[_Key] = field(default_factory=set)  # that products of the forward pass sum over

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            rule = node.rule
            for value, dims in (
                *zip(node.operands, rule.operands, strict=True),
                *zip(node.results, rule.results, strict=True),
            ):
                for dim, factors in enumerate(dims):
                    if factors:
                        self._union((False, value, dim), (True, index, factors[0]))
        for key, index, factors in self._read_dims():
            node = self.nodes[index]
            # Shards of an indexed array give partial sums, all but one of which are zero.
            unsplit = node.rule.fixed | (node.rule.reduction if node.name == "gather" else set())
            if node.kind is NodeKind.OP and (not factors or factors[0] in unsplit):
                self.whole.setdefault(self._find(key), set()).add(index)
            if node.is_heavy and node.region == FORWARD and set(factors) & node.rule.reduction:
                self.summed.add(self._find(key))

    def _read_dims(self) -> Iterator[tuple[_Key, int, tuple[int, ...]]]:
        """(dimension of an operand, node that reads it, its factors there)."""
        for index, node in enumerate(self.nodes):
            for value, dims in zip(node.operands, node.rule.operands, strict=True):
                for dim, factors in enumerate(dims):
                    if self.values[value].shape[dim] > 1:
                        yield (False, value, dim), index, factors

    def _find(self, key: _Key) -> _Key:
        while (above := self.parent.get(key, key)) != key:
            self.parent[key] = self.parent.get(above, above)
            key = self.parent[key]
        return key

    def _union(self, a: _Key, b: _Key) -> None:
        self.parent[self._find(a)] = self._find(b)

    def _rows(self, value: int) -> _Key:
        return self._find((False, value, 0))

    def are_tied(self, value: int, other: int) -> bool:
        """Whether the rows of two values are split together."""
        return self._rows(value) == self._rows(other)

    def is_tied_to(self, value: int, others: Sequence[int], first: int = 0) -> bool:
        """Whether the rows of a value are split with a dimension of others, from `first` on."""
        rows = self._rows(value)
        return any(
            self._find((False, other, dim)) == rows
            for other in others
            for dim in range(first, len(self.values[other].shape))
        )

    def needs_whole(self, value: int, beside: Sequence[int] = ()) -> bool:
        """Whether an op needs all rows of a value, and not those of the others as well."""
        others: set[int] = set().union(*(self.whole.get(self._rows(v), ()) for v in beside))
        return not self.whole.get(self._rows(value), set()) <= others

    def is_summed(self, value: int) -> bool:
        return self._rows(value) in self.summed
