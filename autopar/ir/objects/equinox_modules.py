"""Equinox modules among arguments and results: which leaves are inputs of the program.

`eqx.filter_jit` traces arrays and treats every other leaf (functions, strings, and Python numbers
too) as part of the program, compared by value. So does autopar for a call with an equinox module
among its arguments or results.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_leaves


def is_equinox_module(x: Any) -> bool:
    library = sys.modules.get("equinox")
    module = getattr(library, "Module", None)
    return module is not None and isinstance(x, module)


def has_equinox_module(tree: Any) -> bool:
    """Whether there is an equinox module in a pytree."""
    if "equinox" not in sys.modules:
        return False
    return any(map(is_equinox_module, tree_leaves(tree, is_leaf=is_equinox_module)))


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a filtered call is traced."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
