"""nnx objects that a step changes in place, as under `nnx.jit`: from objects to pytrees and back.

    split_objects   arguments with objects → `SplitArguments`: arguments with `ObjectTree`s, and
                    what `update_objects` needs
    run_pure        calls a function on objects with object trees; returns a `PureResult`
    update_objects  changes the caller's objects by a `PureResult`; returns the function's value
    merge_objects   a pytree with object trees → the same with new objects

The structure of the objects (`nnx.GraphDef`) is part of the program: another structure means
another plan. All objects of a call are split together, so shared references stay shared. nnx's
update context knows which objects come back: if the step changes their structure, attributes
included, the caller's objects change too. An `nnx.State` is a pytree like any other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from autopar.ir.objects.object_tree import (
    ObjectRoot,
    ObjectTree,
    PureResult,
    arrays_of,
    is_root,
    root_of,
    tree_from_paths,
)

_TAG = "autopar"


def _nnx() -> Any:
    """The library, if it has been imported completely."""
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
class SplitArguments:
    """Arguments with trees for objects; the objects, their variables (or arrays that are attributes
    themselves), and the trees."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objects: tuple[Any, ...] = ()
    variables: tuple[Any, ...] = ()
    trees: tuple[ObjectTree, ...] = ()


NO_OBJECTS = SplitArguments((), {})


def split_objects(
    args: tuple[Any, ...], kwargs: dict[str, Any], static_argnums: Sequence[int] = ()
) -> SplitArguments:
    """`static_argnums`: arguments that are part of the program and stay unchanged."""
    if _nnx() is None:
        return SplitArguments(args, kwargs)
    if static_argnums:
        static = {i: args[i] for i in static_argnums if i < len(args)}
        split = split_objects(tuple(None if i in static else a for i, a in enumerate(args)), kwargs)
        return replace(split, args=tuple(static.get(i, a) for i, a in enumerate(split.args)))
    parts, treedef = tree_flatten((args, kwargs), is_leaf=_ends_walk)
    objects = tuple(filter(is_object, parts))
    if not objects:
        return SplitArguments(args, kwargs)
    nnx = _nnx()
    with nnx.update_context(_TAG), nnx.split_context(_TAG) as context:
        graph, state = context.flatten(objects)
    trees = _trees(len(objects), graph, state)
    each = iter(trees)
    parts = [next(each) if is_object(part) else part for part in parts]
    args, kwargs = tree_unflatten(treedef, parts)
    return SplitArguments(args, kwargs, objects, tuple(variable for _, variable in state), trees)


def _trees(count: int, graph: Any, state: Any) -> tuple[ObjectTree, ...]:
    """A tree for each of the objects that were split together."""
    variable_type = _nnx().Variable
    paths: list[list[tuple]] = [[] for _ in range(count)]
    values: list[list[Any]] = [[] for _ in range(count)]
    for (number, *path), leaf in state:
        paths[number].append(tuple(path))
        values[number].append(leaf.get_raw_value() if isinstance(leaf, variable_type) else leaf)
    return tuple(
        tree_from_paths(paths[n], values[n], ObjectRoot(graph if n == 0 else None))
        for n in range(count)
    )


def run_pure(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn` called with object trees: its value if there are no objects, else a `PureResult`."""
    nnx = _nnx()
    parts, treedef = tree_flatten((args, kwargs), is_leaf=is_root)
    roots = [part for part in parts if is_root(part)]
    if nnx is None:
        return fn(*args, **kwargs)
    with nnx.update_context(_TAG):
        objects: tuple[Any, ...] = ()
        if roots:
            values = [value for root in roots for value in arrays_of(root)]
            with nnx.merge_context(_TAG, inner=True) as context:
                objects = context.unflatten(root_of(roots[0]).graph, values)
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
    trees = _trees(len(objects) + len(returned), None, state)
    updated = [
        ObjectTree((), (), ObjectRoot(is_unchanged=True)) if _is_unchanged(old, new) else new
        for old, new in zip(roots, trees, strict=False)
    ]
    each = iter(updated)
    changed = tree_unflatten(treedef, [next(each) if is_root(part) else None for part in parts])
    each = iter(trees[len(updated) :])
    value = tree_unflatten(
        result_tree, [next(each) if is_object(part) else part for part in results]
    )
    same_structure = bool(roots) and not returned
    same_structure = same_structure and graph.with_no_outer_index() == root_of(roots[0]).graph
    return PureResult(_by_argument(fn, *changed), value, graph, same_structure)


def _is_unchanged(old: ObjectTree, new: ObjectTree) -> bool:
    """Whether an object's variables have the same values, so that nothing has to be returned."""
    before, after = list(arrays_of(old)), list(arrays_of(new))
    if len(before) != len(after):
        return False
    return all(a is b for a, b in zip(before, after, strict=True))


def _by_argument(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """{name of an argument with objects: the argument}."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # some callables have no signature
        names = []
    named = {names[i] if i < len(names) else f"args[{i}]": arg for i, arg in enumerate(args)}
    named |= dict(sorted(kwargs.items()))
    return {name: arg for name, arg in named.items() if _roots(arg)}


def _roots(tree: Any) -> list[Any]:
    return [part for part in tree_leaves(tree, is_leaf=is_root) if is_root(part)]


def update_objects(split: SplitArguments, result: Any) -> Any:
    """The function's value, after changing the caller's objects as the result says."""
    if not isinstance(result, PureResult):
        return result
    nnx = _nnx()
    old = [root for argument in result.changed.values() for root in _roots(argument)]
    new = _roots(result.value)
    values: list[Any] = []
    for before, after in zip(split.trees, old, strict=True):
        values += arrays_of(before if root_of(after).is_unchanged else after)
    values += [value for root in new for value in arrays_of(root)]
    if result.same_structure and all(isinstance(v, nnx.Variable) for v in split.variables):
        for variable, value in zip(split.variables, values, strict=True):
            variable.set_raw_value(value)
        return result.value
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            context.flatten(split.objects, with_paths=False)
        with nnx.merge_context(_TAG, inner=False) as context:
            objects = context.unflatten(result.graph, values)
    return _with_objects(result.value, objects[len(old) :])


def merge_objects(tree: Any) -> Any:
    """A pytree with new objects for its object trees, all from one call. The `PureResult` of a
    function without objects among its arguments becomes its value."""
    if isinstance(tree, PureResult):
        return update_objects(NO_OBJECTS, tree)
    roots = _roots(tree)
    if not roots:
        return tree
    nnx = _nnx()
    values = [value for root in roots for value in arrays_of(root)]
    with nnx.update_context(_TAG), nnx.merge_context(_TAG, inner=True) as context:
        objects = context.unflatten(root_of(roots[0]).graph, values)
    return _with_objects(tree, objects)


def _with_objects(tree: Any, objects: Sequence[Any]) -> Any:
    if not objects:
        return tree
    parts, treedef = tree_flatten(tree, is_leaf=is_root)
    each = iter(objects)
    return tree_unflatten(treedef, [next(each) if is_root(part) else part for part in parts])
