"""An object's arrays as a pytree (`ObjectTree`), and a pure function's result (`PureResult`).

Paths in the tree are those that the user knows: `model.layers[0].kernel` has its path in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, tree_flatten

Key = str | int


@dataclass(frozen=True)
class ObjectRoot:
    """What the root of an object's tree knows.

    graph:        in the first of all trees, the structure of all their objects together, with
                  shared references; None in the others.
    is_unchanged: the function left the object's arrays unchanged, and the tree is empty.
    """

    graph: Any = None
    is_unchanged: bool = False


class ObjectTree:
    """An object, or a part of one: attributes or items that are trees, arrays, or pytrees."""

    __slots__ = ("_children", "_keys", "_root")

    def __init__(
        self, keys: Sequence[Key], children: Sequence[Any], root_info: ObjectRoot | None = None
    ) -> None:
        self._keys = tuple(keys)
        self._children = tuple(children)
        self._root = root_info

    def __getattr__(self, name: str) -> Any:
        # Slots are missing while the tree is being made.
        if name in ObjectTree.__slots__ or name not in self._keys:
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key: Key) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        return self._children[self._keys.index(key)]

    def __repr__(self) -> str:
        parts = zip(self._keys, self._children, strict=True)
        return "ObjectTree(" + ", ".join(f"{key}={child!r}" for key, child in parts) + ")"


def is_root(x: Any) -> bool:
    return isinstance(x, ObjectTree) and x._root is not None


def root_of(tree: ObjectTree) -> ObjectRoot:
    assert tree._root is not None
    return tree._root


def arrays_of(tree: ObjectTree) -> Iterator[Any]:
    """The values of the object's variables, in the order of its structure."""
    for child in tree._children:
        if isinstance(child, ObjectTree):
            yield from arrays_of(child)
        else:
            yield child


def tree_from_paths(
    paths: Sequence[tuple[Key, ...]], values: Sequence[Any], root_info: ObjectRoot
) -> ObjectTree:
    """A tree of values at paths. Values below one attribute are adjacent, as in a walk through the
    object, and keep their order."""
    if paths == [()]:  # the object is a variable
        return ObjectTree(("value",), values, root_info)
    root: dict[Key, Any] = {}
    for path, value in zip(paths, values, strict=True):
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, _Branch())
        branch[path[-1]] = value
    return _tree(root, root_info)


class _Branch(dict[Any, Any]):
    """An inner tree that is being built; a plain dict is the value of a variable."""


def _tree(branch: dict[Key, Any], root_info: ObjectRoot | None) -> ObjectTree:
    children = [_tree(c, None) if isinstance(c, _Branch) else c for c in branch.values()]
    return ObjectTree(tuple(branch), children, root_info)


def _entry(key: Key) -> Any:
    if isinstance(key, str):
        return GetAttrKey(key) if key.isidentifier() else DictKey(key)
    return SequenceKey(key) if isinstance(key, int) else DictKey(key)


def _flatten_tree(tree: ObjectTree) -> tuple[tuple[Any, ...], Any]:
    return tree._children, (tree._keys, tree._root)


def _flatten_tree_with_keys(tree: ObjectTree) -> tuple[list[tuple[Any, Any]], Any]:
    entries = zip(map(_entry, tree._keys), tree._children, strict=True)
    return list(entries), (tree._keys, tree._root)


def _unflatten_tree(about: Any, children: Iterable[Any]) -> ObjectTree:
    return ObjectTree(about[0], tuple(children), about[1])


jax.tree_util.register_pytree_with_keys(
    ObjectTree, _flatten_tree_with_keys, _unflatten_tree, _flatten_tree
)


@dataclass(frozen=True)
class PureResult:
    """The result of a function on objects.

    changed:        argument -> the argument with only the trees of its objects in it.
    value:          the function's value, with trees for objects.
    graph:          the structure of all these objects after the call.
    same_structure: the call left the structure unchanged.
    """

    changed: dict[str, Any]
    value: Any
    graph: Any
    same_structure: bool = False


@dataclass(frozen=True)
class _Itself:
    """The key of the function's value, which has no name in paths."""

    name: str = ""

    def __str__(self) -> str:
        return ""


def _flatten_result(result: PureResult) -> tuple[tuple[Any, ...], Any]:
    children = (*result.changed.values(), result.value)
    return children, (tuple(result.changed), result.graph, result.same_structure)


def _flatten_result_with_keys(result: PureResult) -> tuple[list[tuple[Any, Any]], Any]:
    children, about = _flatten_result(result)
    keys = [*map(DictKey, result.changed), _Itself()]
    return list(zip(keys, children, strict=True)), about


def _unflatten_result(about: Any, children: Iterable[Any]) -> PureResult:
    names, graph, same_structure = about
    *changed, value = children
    return PureResult(dict(zip(names, changed, strict=True)), value, graph, same_structure)


jax.tree_util.register_pytree_with_keys(
    PureResult, _flatten_result_with_keys, _unflatten_result, _flatten_result
)


def object_leaves(tree: Any) -> set[int]:
    """The positions of the leaves of a pytree that are arrays of objects."""
    leaves: set[int] = set()
    position = 0
    for part in tree_flatten(tree, is_leaf=is_root)[0]:
        count = len(tree_flatten(part)[0]) if is_root(part) else 1
        if is_root(part):
            leaves.update(range(position, position + count))
        position += count
    return leaves
