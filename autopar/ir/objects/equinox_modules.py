"""Equinox modules among arguments and results: which leaves are inputs of the program.

`eqx.filter_jit` traces arrays and takes every other leaf (functions, texts, but Python's numbers
too) as part of the program, compared by value. A call that has an equinox module among its
arguments, or its results, is treated so.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_leaves


def is_filtered_type(x: Any) -> bool:
    library = sys.modules.get("equinox")
    module = getattr(library, "Module", None)
    return module is not None and isinstance(x, module)


def is_filtered(tree: Any) -> bool:
    """Whether there is an equinox module in a pytree."""
    if "equinox" not in sys.modules:
        return False
    return any(map(is_filtered_type, tree_leaves(tree, is_leaf=is_filtered_type)))


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a filtered call is traced."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
