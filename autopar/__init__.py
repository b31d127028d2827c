"""autopar: a single-device JAX train step, run well on many devices, by itself.

Nothing is imported before it is used: `import autopar` costs milliseconds, and the first use of a
name the rest. The public names stand once, in `__init__.pyi`: type checkers read its imports, and
so does this module, to import what is asked for. (`lazy_loader` does the same; twenty lines cost
less than one more package that every GPU host must have.)
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_MODULE_OF = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """A public name, or a module of autopar, imported when it is first asked for."""
    module = _MODULE_OF.get(name, f"{__name__}.{name}")
    try:
        if name in _MODULE_OF:
            globals()[name] = getattr(importlib.import_module(module), name)
            return globals()[name]
        if not name.startswith("_"):
            return importlib.import_module(module)
    except ImportError as error:
        if error.name != module:
            from autopar._requirements import raise_if_missing

            raise_if_missing(error)
            raise
    from autopar.errors import near_names

    near = "" if name.startswith("_") else near_names(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}", name=name)


def __dir__() -> list[str]:
    """The public names, which is what completion should offer; modules are found by name."""
    return sorted((*__all__, "__version__", "errors"))
