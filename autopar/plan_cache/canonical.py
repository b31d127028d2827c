"""What a value is made of, apart from the process it lives in: any object → nested plain data.

Values that decide a plan are hashed by their printed form, so that form must be equal in every
process exactly if the values are. Types that are not known to have such a form have none: a
guess could make two programs equal that are not, and the worst without a guess is to plan again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar import _jax

_ATOMS = frozenset((type(None), bool, int, str, bytes, type(...)))


class NotCanonicalError(Exception):
    """A value of which two processes cannot tell whether it is the same."""


def canonical(value: Any) -> Any:
    """Nested tuples of numbers and text; `NotCanonicalError` if the value has no such form."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in (float, complex):
        return repr(value)  # NaN equals itself here
    if kind in (tuple, list):
        return (kind.__name__, *map(canonical, value))
    if isinstance(value, Mapping):
        entries = [(canonical(key), canonical(entry)) for key, entry in value.items()]
        return ("dict", *sorted(entries, key=repr))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(map(canonical, value), key=repr))
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return ("array", _frequent_form(value.dtype), (), False, value.tobytes().hex())
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return array_form(value)
    if isinstance(value, (np.dtype, NamedSharding)):
        return _frequent_form(value)
    if isinstance(value, Enum):
        return (_name(kind), value.name)
    if isinstance(value, type):
        return ("type", _name(value))
    return _object_form(value)


def array_form(value: Any) -> tuple[Any, ...]:
    """Type, shape and a digest of the content."""
    try:
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return ("key", str(value.dtype), array_form(jax.random.key_data(value)))
        content: np.ndarray[Any, Any] = np.ascontiguousarray(np.asarray(value))
    except (RuntimeError, TypeError, ValueError) as error:  # deleted, or on other hosts
        raise NotCanonicalError(f"an array that cannot be read here ({error})") from error
    if content.dtype.hasobject:
        raise NotCanonicalError(f"an array of {content.dtype}")
    is_weak = bool(getattr(value, "weak_type", False))
    data = content.tobytes()
    text = data.hex() if len(data) <= 32 else hashlib.sha256(data).hexdigest()
    return ("array", _frequent_form(content.dtype), content.shape, is_weak, text)


def _object_form(value: Any) -> Any:
    kind = type(value)
    if hasattr(_jax.open_jaxpr(value)[0], "eqns"):
        return _jaxpr_form(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, functools.partial)):
        return _function_form(value)
    if isinstance(value, PartitionSpec):
        return ("PartitionSpec", repr(value))
    if isinstance(value, AbstractMesh):
        return ("AbstractMesh", str(value))
    if isinstance(value, Mesh):
        if value.empty:  # JAX's stand-in for no mesh has a device that is None
            return ("Mesh",)
        devices = [(d.platform, d.device_kind, d.id) for d in value.devices.flat]
        return ("Mesh", value.axis_names, value.devices.shape, repr(devices))
    if dataclasses.is_dataclass(value):
        fields = [(f.name, canonical(getattr(value, f.name))) for f in dataclasses.fields(value)]
        return (_name(kind), *fields)
    if isinstance(value, tuple):  # a named one
        return (_name(kind), *map(canonical, value))
    if isinstance(value, (int, float, str)):
        return (_name(kind), repr(value))
    if isinstance(value, ShapedArray):
        return ("ShapedArray", str(value), bool(value.weak_type))
    if not _has_state(value):
        return ("object", _name(kind))
    raise NotCanonicalError(f"a {_name(kind)}")


@functools.lru_cache(maxsize=4096)
def _frequent_form(value: Any) -> Any:
    """Of values that most equations have, and that are hashed faster than written."""
    if isinstance(value, np.dtype):
        return ("dtype", str(value))
    return ("NamedSharding", canonical(value.mesh), repr(value.spec), value.memory_kind)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _has_state(value: Any) -> bool:
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    return bool(slots) or not hasattr(value, "__dict__") or bool(value.__dict__)


# -- functions


def _function_form(function: Any) -> Any:
    """A function by its code and what it closes over; JAX's own by name, since its version is part
    of every key."""
    if isinstance(function, functools.partial):
        return ("partial", *map(canonical, (function.func, function.args, function.keywords)))
    if isinstance(function, MethodType):
        return ("method", canonical(function.__func__), canonical(function.__self__))
    name = f"{function.__module__}.{function.__qualname__}"
    if isinstance(function, BuiltinFunctionType):
        return ("builtin", name)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    inside = (cells, function.__defaults__, function.__kwdefaults__)
    if name.split(".")[0] in ("jax", "jaxlib"):
        return ("function", name, canonical(inside))
    return ("function", name, code_digest(function.__code__), canonical(inside))


@functools.lru_cache(maxsize=4096)
def code_digest(code: CodeType) -> str:
    """Of what a function does, wherever in which file it stands."""
    digest = hashlib.sha256(code.co_code)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    digest.update(repr((names, code.co_argcount, code.co_flags)).encode())
    for constant in code.co_consts:
        is_code = isinstance(constant, CodeType)
        part = code_digest(constant) if is_code else repr(canonical(constant))
        digest.update(part.encode())
    return digest.hexdigest()


# -- jaxprs


def _jaxpr_form(value: Any) -> Any:
    """A jaxpr in a parameter (a kernel, a reduction), with its variables numbered in order."""
    jaxpr, constants = _jax.open_jaxpr(value)
    numbers: dict[Any, int] = {}

    def atom(given: Any) -> Any:
        if isinstance(given, _jax.Literal):
            return ("literal", canonical(given.val), str(given.aval))
        return numbers.setdefault(given, len(numbers)), str(given.aval)

    inputs = [atom(v) for v in (*jaxpr.constvars, *jaxpr.invars)]
    equations = []
    for equation in jaxpr.eqns:
        operands = [atom(v) for v in equation.invars]
        params = canonical(dict(equation.params))
        results = [atom(v) for v in equation.outvars]
        equations.append((equation.primitive.name, params, operands, results))
    outputs = [atom(v) for v in jaxpr.outvars]
    return ("jaxpr", repr((inputs, equations, outputs)), canonical(list(constants)))
