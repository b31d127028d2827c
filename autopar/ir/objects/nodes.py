"""The arrays of an object as a pytree with the names that the user knows them by.

Node      an object, or a part of one: `model.layers[0].kernel` has the path it has in Python
Outcome   what a function on objects comes to: what it changed, and what it returned
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, tree_flatten

Key = str | int


@dataclass(frozen=True)
class ObjectPath:
    """Of a node that stands for a whole object.

    graph: on the first of all such nodes, the structure of all their objects together, references
           that they share included; None on the others.
    kept:  after the function, the object has the arrays that it had before, and the node has none.
    """

    graph: Any = None
    kept: bool = False


class ObjectNode:
    """A part of an object: attributes or items that are nodes, arrays, or pytrees of arrays."""

    __slots__ = ("_children", "_keys", "_origin")

    def __init__(
        self, keys: Sequence[Key], children: Sequence[Any], origin: ObjectPath | None = None
    ) -> None:
        self._keys = tuple(keys)
        self._children = tuple(children)
        self._origin = origin

    def __getattr__(self, name: str) -> Any:
        if (
            name in ObjectNode.__slots__ or name not in self._keys
        ):  # the former while it is being made
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key: Key) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        return self._children[self._keys.index(key)]

    def __repr__(self) -> str:
        parts = zip(self._keys, self._children, strict=True)
        return "Node(" + ", ".join(f"{key}={child!r}" for key, child in parts) + ")"


def is_root(x: Any) -> bool:
    return isinstance(x, ObjectNode) and x._origin is not None


def origin_of(root: ObjectNode) -> ObjectPath:
    assert root._origin is not None
    return root._origin


def values_of(node: ObjectNode) -> Iterator[Any]:
    """What the object's variables hold, in the order of its structure."""
    for child in node._children:
        if isinstance(child, ObjectNode):
            yield from values_of(child)
        else:
            yield child


def nested(
    paths: Sequence[tuple[Key, ...]], values: Sequence[Any], origin: ObjectPath
) -> ObjectNode:
    """A node of values at paths. Those below one attribute follow each other, as a walk through an
    object finds them, and keep their order."""
    if paths == [()]:  # the object is a variable
        return ObjectNode(("value",), values, origin)
    root: dict[Key, Any] = {}
    for path, value in zip(paths, values, strict=True):
        place = root
        for key in path[:-1]:
            place = place.setdefault(key, _NodePlace())
        place[path[-1]] = value
    return _node(root, origin)


class _NodePlace(dict[Any, Any]):
    """An inner place while a node is built: a variable may hold a dict of its own."""


def _node(place: dict[Key, Any], origin: ObjectPath | None) -> ObjectNode:
    children = [_node(c, None) if isinstance(c, _NodePlace) else c for c in place.values()]
    return ObjectNode(tuple(place), children, origin)


def _entry(key: Key) -> Any:
    if isinstance(key, str):
        return GetAttrKey(key) if key.isidentifier() else DictKey(key)
    return SequenceKey(key) if isinstance(key, int) else DictKey(key)


def _flatten_node(node: ObjectNode) -> tuple[tuple[Any, ...], Any]:
    return node._children, (node._keys, node._origin)


def _flatten_node_with_keys(node: ObjectNode) -> tuple[list[tuple[Any, Any]], Any]:
    entries = zip(map(_entry, node._keys), node._children, strict=True)
    return list(entries), (node._keys, node._origin)


def _unflatten_node(about: Any, children: Iterable[Any]) -> ObjectNode:
    return ObjectNode(about[0], tuple(children), about[1])


jax.tree_util.register_pytree_with_keys(
    ObjectNode, _flatten_node_with_keys, _unflatten_node, _flatten_node
)


@dataclass(frozen=True)
class ObjectResult:
    """What a function on objects comes to.

    changed: argument -> the argument with a node for each of its objects, and nothing else in it.
    value:   what the function returned, objects as nodes.
    graph:   the structure of the objects of both, afterwards.
    is_same: it is the structure that was there before.
    """

    changed: dict[str, Any]
    value: Any
    graph: Any
    is_same: bool = False


@dataclass(frozen=True)
class _Itself:
    """The key of what a function returned: it has no name of its own in paths."""

    name: str = ""

    def __str__(self) -> str:
        return ""


def _flatten_outcome(outcome: ObjectResult) -> tuple[tuple[Any, ...], Any]:
    children = (*outcome.changed.values(), outcome.value)
    return children, (tuple(outcome.changed), outcome.graph, outcome.is_same)


def _flatten_outcome_with_keys(outcome: ObjectResult) -> tuple[list[tuple[Any, Any]], Any]:
    children, about = _flatten_outcome(outcome)
    keys = [*map(DictKey, outcome.changed), _Itself()]
    return list(zip(keys, children, strict=True)), about


def _unflatten_outcome(about: Any, children: Iterable[Any]) -> ObjectResult:
    names, graph, is_same = about
    *changed, value = children
    return ObjectResult(dict(zip(names, changed, strict=True)), value, graph, is_same)


jax.tree_util.register_pytree_with_keys(
    ObjectResult, _flatten_outcome_with_keys, _unflatten_outcome, _flatten_outcome
)


def leaves_in_nodes(tree: Any) -> set[int]:
    """Which leaves of a pytree, by number, are arrays of objects."""
    found: set[int] = set()
    position = 0
    for part in tree_flatten(tree, is_leaf=is_root)[0]:
        count = len(tree_flatten(part)[0]) if is_root(part) else 1
        if is_root(part):
            found.update(range(position, position + count))
        position += count
    return found
