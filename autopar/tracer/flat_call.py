"""From a function and the arguments of one call to a `FlatCall`.

Arguments may be any pytrees. Leaves that are arrays or scalars become inputs; every other leaf (a
function, a string) is static: part of the program's identity, never traced. In a call with an
equinox module, Python scalars are static too, as in `eqx.filter_jit`. nnx objects are split into
pytrees of their arrays (`ir.objects`). Each input is named by its path as the user would write it,
`state.params['Dense_0']['kernel']`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from autopar.errors import ArgumentError
from autopar.ir.objects.equinox_modules import has_equinox_module, is_array
from autopar.ir.objects.nnx import split_objects
from autopar.ir.objects.object_tree import object_leaves
from autopar.ir.traced_step import FlatCall, KeyPath, StaticLeaf


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
    _check_positions(static_argnums, len(args))
    apart = split_objects(args, kwargs, static_argnums)
    args, kwargs = apart.args, apart.kwargs
    static_args = tuple((i, args[i]) for i in sorted(static_argnums))
    _check_hashable(static_args, static_argnums)
    dynamic = [i for i in range(len(args)) if i not in set(static_argnums)]
    names = argument_names(fn)
    tree = (tuple(args[i] for i in dynamic), kwargs)
    flat, treedef = tree_flatten_with_path(tree)
    in_objects_at = object_leaves(tree)
    is_input = is_array if has_equinox_module(tree) else is_array_leaf
    leaves: list[Any] = []
    paths: list[str] = []
    owners: list[int | str] = []
    key_paths: list[KeyPath] = []
    static: list[tuple[int, StaticLeaf]] = []
    in_objects: set[int] = set()
    for position, (path, leaf) in enumerate(flat):
        if not is_input(leaf):
            static.append((position, StaticLeaf(leaf)))
            continue
        if path[0].idx == 0:
            owner = dynamic[path[1].idx]
            name = names[owner] if owner < len(names) else f"args[{owner}]"
        else:
            owner = name = path[1].key
        if position in in_objects_at:
            in_objects.add(len(leaves))
        leaves.append(leaf)
        paths.append(name + keystr(path[2:]))
        owners.append(owner)
        key_paths.append(tuple(path[2:]))
    return FlatCall(
        leaves=tuple(leaves),
        paths=tuple(paths),
        argument=tuple(owners),
        key_paths=tuple(key_paths),
        treedef=treedef,
        static=tuple(static),
        static_args=static_args,
        in_objects=frozenset(in_objects),
    )


def _check_positions(static_argnums: Sequence[int], num_args: int) -> None:
    for position in static_argnums:
        if not 0 <= position < num_args:
            raise ArgumentError(
                f"static_argnums={tuple(static_argnums)} names argument {position}, but the call "
                f"gave {num_args} positional arguments. Give positions 0 to {num_args - 1}."
            )


def _check_hashable(static_args: Sequence[tuple[int, Any]], static_argnums: Sequence[int]) -> None:
    for position, value in static_args:
        try:
            hash(value)
        except TypeError as error:
            raise ArgumentError(
                f"static_argnums={tuple(static_argnums)}: argument {position} is a "
                f"{type(value).__name__}, which cannot be hashed. Static arguments are compared "
                "between calls: pass a hashable value such as a number, string or tuple."
            ) from error


def argument_names(fn: Callable[..., Any]) -> list[str]:
    """The user's names of the positional arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional]
