"""Objects of Flax's nnx that a step changes in place, as under `nnx.jit`.

    taken_apart   arguments with objects → arguments with nodes, and what is needed to put back
    run_pure      a function on objects, called with nodes: objects are made of them, and what it
                  returns is an `ObjectResult`
    put_back      an `ObjectResult` → the caller's objects changed, and the function's value
    assembled     a pytree with nodes → the same with new objects

The structure of the objects (`nnx.GraphDef`) is part of the program, so that another one means
another plan. All objects of a call are split together: references that they share stay shared.
Which objects come back is known by nnx's own update context: a structure that the step changed,
attributes included, is changed in the caller's objects too. An `nnx.State` is a pytree like any
other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from autopar.ir.objects.nodes import (
    ObjectNode,
    ObjectPath,
    ObjectResult,
    is_root,
    nested,
    origin_of,
    values_of,
)

_TAG = "autopar"


def _nnx() -> Any:
    """The library, if something has imported it, all of it."""
    library = sys.modules.get("flax.nnx")
    return library if hasattr(library, "update_context") else None


def is_object(x: Any) -> bool:
    nnx = _nnx()
    if nnx is None:
        return False
    return isinstance(x, (getattr(nnx, "Pytree", nnx.Object), nnx.Variable))


def _ends_walk(x: Any) -> bool:
    nnx = _nnx()
    states = (nnx.State, nnx.FlatState) if hasattr(nnx, "FlatState") else (nnx.State,)
    return is_object(x) or isinstance(x, states)


def has_objects(tree: Any) -> bool:
    return _nnx() is not None and any(map(is_object, tree_leaves(tree, is_leaf=_ends_walk)))


@dataclass(frozen=True)
class TakenObjects:
    """Arguments with nodes for objects; the objects, their variables (or arrays that are attributes
    themselves), and what these held."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objects: tuple[Any, ...] = ()
    variables: tuple[Any, ...] = ()
    nodes: tuple[ObjectNode, ...] = ()


NOTHING_TAKEN = TakenObjects((), {})


def taken_apart(
    args: tuple[Any, ...], kwargs: dict[str, Any], static_argnums: Sequence[int] = ()
) -> TakenObjects:
    """`static_argnums`: arguments that are part of the program, and stay as they are."""
    if _nnx() is None:
        return TakenObjects(args, kwargs)
    if static_argnums:
        static = {i: args[i] for i in static_argnums if i < len(args)}
        taken = taken_apart(tuple(None if i in static else a for i, a in enumerate(args)), kwargs)
        return replace(taken, args=tuple(static.get(i, a) for i, a in enumerate(taken.args)))
    parts, treedef = tree_flatten((args, kwargs), is_leaf=_ends_walk)
    objects = tuple(filter(is_object, parts))
    if not objects:
        return TakenObjects(args, kwargs)
    nnx = _nnx()
    with nnx.update_context(_TAG), nnx.split_context(_TAG) as context:
        graph, state = context.flatten(objects)
    nodes = _nodes(len(objects), graph, state)
    each = iter(nodes)
    parts = [next(each) if is_object(part) else part for part in parts]
    args, kwargs = tree_unflatten(treedef, parts)
    return TakenObjects(args, kwargs, objects, tuple(variable for _, variable in state), nodes)


def _nodes(count: int, graph: Any, state: Any) -> tuple[ObjectNode, ...]:
    """A node for each of the objects that were split together."""
    variable_type = _nnx().Variable
    own: list[tuple[list[tuple], list[Any]]] = [([], []) for _ in range(count)]
    for (number, *path), leaf in state:
        own[number][0].append(tuple(path))
        own[number][1].append(leaf.get_raw_value() if isinstance(leaf, variable_type) else leaf)
    return tuple(
        nested(own_paths, own_values, ObjectPath(graph if number == 0 else None))
        for number, (own_paths, own_values) in enumerate(own)
    )


def run_pure(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn` on nodes: its value if there are no objects, else an `ObjectResult`."""
    nnx = _nnx()
    parts, treedef = tree_flatten((args, kwargs), is_leaf=is_root)
    roots = [part for part in parts if is_root(part)]
    if nnx is None:
        return fn(*args, **kwargs)
    with nnx.update_context(_TAG):
        objects: tuple[Any, ...] = ()
        if roots:
            values = [value for root in roots for value in values_of(root)]
            with nnx.merge_context(_TAG, inner=True) as context:
                objects = context.unflatten(origin_of(roots[0]).graph, values)
            each = iter(objects)
            args, kwargs = tree_unflatten(
                treedef, [next(each) if is_root(part) else part for part in parts]
            )
        value = fn(*args, **kwargs)
        results, result_tree = tree_flatten(value, is_leaf=_ends_walk)
        returned = tuple(filter(is_object, results))
        if not objects and not returned:
            return value
        with nnx.split_context(_TAG) as context:
            graph, state = context.flatten((*objects, *returned))
    nodes = _nodes(len(objects) + len(returned), None, state)
    own = [
        ObjectNode((), (), ObjectPath(kept=True)) if _is_kept(old, new) else new
        for old, new in zip(roots, nodes, strict=False)
    ]
    each = iter(own)
    changed = tree_unflatten(treedef, [next(each) if is_root(part) else None for part in parts])
    each = iter(nodes[len(own) :])
    value = tree_unflatten(
        result_tree, [next(each) if is_object(part) else part for part in results]
    )
    is_same = bool(roots) and not returned
    is_same = is_same and graph.with_no_outer_index() == origin_of(roots[0]).graph
    return ObjectResult(_by_argument(fn, *changed), value, graph, is_same)


def _is_kept(old: ObjectNode, new: ObjectNode) -> bool:
    """Whether an object's variables hold what they held, so that nothing need be returned."""
    before, after = list(values_of(old)), list(values_of(new))
    if len(before) != len(after):
        return False
    return all(a is b for a, b in zip(before, after, strict=True))


def _by_argument(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """{argument's name: argument}, of those that have objects."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # some callables tell nothing
        names = []
    named = {names[i] if i < len(names) else f"args[{i}]": arg for i, arg in enumerate(args)}
    named |= dict(sorted(kwargs.items()))
    return {name: arg for name, arg in named.items() if _roots(arg)}


def _roots(tree: Any) -> list[Any]:
    return [part for part in tree_leaves(tree, is_leaf=is_root) if is_root(part)]


def put_back(taken: TakenObjects, outcome: Any) -> Any:
    """The function's value, after the caller's objects were given what it says."""
    if not isinstance(outcome, ObjectResult):
        return outcome
    nnx = _nnx()
    old = [root for argument in outcome.changed.values() for root in _roots(argument)]
    new = _roots(outcome.value)
    values: list[Any] = []
    for before, after in zip(taken.nodes, old, strict=True):
        values += values_of(before if origin_of(after).kept else after)
    values += [value for root in new for value in values_of(root)]
    if outcome.is_same and all(isinstance(v, nnx.Variable) for v in taken.variables):
        for variable, value in zip(taken.variables, values, strict=True):
            variable.set_raw_value(value)
        return outcome.value
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            context.flatten(taken.objects, with_paths=False)
        with nnx.merge_context(_TAG, inner=False) as context:
            objects = context.unflatten(outcome.graph, values)
    return _with_objects(outcome.value, objects[len(old) :])


def assembled(tree: Any) -> Any:
    """A pytree with new objects for its nodes, all of which come from one call; an `ObjectResult`
    of a function that had no objects among its arguments is its value."""
    if isinstance(tree, ObjectResult):
        return put_back(NOTHING_TAKEN, tree)
    roots = _roots(tree)
    if not roots:
        return tree
    nnx = _nnx()
    values = [value for root in roots for value in values_of(root)]
    with nnx.update_context(_TAG), nnx.merge_context(_TAG, inner=True) as context:
        objects = context.unflatten(origin_of(roots[0]).graph, values)
    return _with_objects(tree, objects)


def _with_objects(tree: Any, objects: Sequence[Any]) -> Any:
    if not objects:
        return tree
    parts, treedef = tree_flatten(tree, is_leaf=is_root)
    each = iter(objects)
    return tree_unflatten(treedef, [next(each) if is_root(part) else part for part in parts])
