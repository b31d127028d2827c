"""Arrays on workers: the driver's handles to them.

A `DistributedArray` has a shape, a type and a place, but no values. They are fetched on demand,
each shard from one device only. When the handle is dropped, the workers free their buffers with the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec

from autopar import _jax
from autopar.errors import ArgumentError
from autopar.ir.remote import ShardedType
from autopar.ir.rows import Rows, first_row
from autopar.ir.spec import to_partition_spec
from autopar.runtime.remote.mesh import RemoteMesh


@dataclass(frozen=True)
class MeshPlace:
    """A mesh of a cluster: the cluster's numbers of its devices, in the arrangement that the spec
    of an array refers to."""

    devices: tuple[int, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __repr__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))
        return f"mesh({axes}; devices {_ranges(self.devices)})"


def _ranges(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if list(numbers) == list(range(first, last + 1)):
        return f"{first}" if first == last else f"{first}-{last}"
    return ",".join(map(str, numbers))


class Copy(NamedTuple):
    """A copy of the value on one mesh, known there by its number; of a stack over layers that is
    split over stages, of `rows` of it."""

    mesh: RemoteMesh
    number: int
    type: ShardedType
    rows: Rows | None = None

    @property
    def first_row(self) -> tuple[int, ...]:
        """Where its rows start, per leading dimension."""
        return () if self.rows is None else first_row(self.rows)


class ArrayOwner(Protocol):
    """The session that an array belongs to; it fetches raw values."""

    def fetch(self, array: DistributedArray) -> np.ndarray: ...


class ArrayTypeError(ArgumentError, TypeError):
    """An operation that arrays of this type do not support. Also a `TypeError`, which Python, NumPy
    and JAX raise."""


class DistributedArray:
    """An array on the meshes of a cluster. `np.asarray(x)`, `float(x)` and `x.fetch()` bring its
    value to the driver; parallelized steps take it as it is."""

    __slots__ = ("__weakref__", "_copies", "_known", "dtype", "owner", "shape", "weak_type")

    def __init__(
        self,
        owner: ArrayOwner | None,
        shape: tuple[int, ...],
        dtype: Any,
        weak_type: bool,
        copies: tuple[Copy, ...],
        known: Callable[[], np.ndarray | None] | None = None,
    ) -> None:
        self.owner = owner
        self._copies = copies
        self._known = known  # waits for its step; returns its raw value, or None
        self.shape = shape
        self.dtype = dtype
        self.weak_type = weak_type

    # -- properties

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the value, counted once."""
        return sum(copy.type.nbytes for copy in self.held()) if self._copies else 0

    @property
    def spec(self) -> PartitionSpec:
        """How it is split over the axes of its (first) mesh."""
        type_ = self.first().type
        return to_partition_spec(type_.layout, self.ndim, type_.axis_names)

    @property
    def mesh(self) -> MeshPlace:
        """The (first) mesh that holds it."""
        return self.meshes[0]

    @property
    def meshes(self) -> tuple[MeshPlace, ...]:
        """All meshes that hold it: each the whole value, or rows of a stack over layers."""
        self.first()
        return tuple(
            MeshPlace(
                tuple(copy.mesh.devices[place] for place in copy.type.grid),
                copy.type.mesh_shape,
                copy.type.axis_names,
            )
            for copy in self._copies
        )

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Where its buffers are: a copy per mesh, or the parts of a stack, in order."""
        return self._copies

    @property
    def is_in_parts(self) -> bool:
        """Whether several meshes hold rows of it, and none all of it."""
        return bool(self._copies) and self._copies[0].rows is not None

    def held(self) -> tuple[Copy, ...]:
        """The copies that are its value together: the first, or all parts."""
        self.first()
        return self._copies if self.is_in_parts else self._copies[:1]

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and type, as JAX has them."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type)

    def is_deleted(self) -> bool:
        """Whether its buffers were freed, or used up by a step."""
        return not self._copies

    def __repr__(self) -> str:
        name = f"DistributedArray({self.dtype}{list(self.shape)}"
        if self.is_deleted():
            return f"{name}, deleted)"
        num_others = len(self.meshes) - 1
        others = f" and {num_others} more" if num_others else ""
        return f"{name}, {self.spec} on {self.mesh}{others})"

    # -- its value

    def fetch(self) -> Any:
        """The value as a NumPy array; of random keys, as a JAX array of keys."""
        raw = self._raw()
        if _jax.is_extended_dtype(self.dtype):
            bits = jax.numpy.asarray(raw)
            return jax.random.wrap_key_data(bits, impl=_jax.key_implementation(self.dtype))
        return raw

    def _raw(self) -> np.ndarray:
        self.first()
        if self._known is not None:
            value = self._known()
            if value is not None:
                return value.copy()  # it is small; the user may write to what he gets
        assert self.owner is not None
        return self.owner.fetch(self)

    def block_until_ready(self) -> DistributedArray:
        """Wait for the step that makes it."""
        self.first()
        if self._known is not None:
            self._known()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ArgumentError(
                f"np.array({self!r}, copy=False): its value must be copied from the workers. Use "
                "np.asarray(x), or copy=None."
            )
        if _jax.is_extended_dtype(self.dtype):
            raise ArrayTypeError(
                f"np.asarray({self!r}): random keys are not numbers. Use x.fetch() for an array of "
                "keys, and jax.random.key_data(x.fetch()) for their bits."
            )
        value = self._raw()
        return value.astype(dtype) if dtype is not None and dtype != value.dtype else value

    def item(self) -> Any:
        """The value of an array of one element, as a Python number."""
        return np.asarray(self).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __index__(self) -> int:
        return np.asarray(self).__index__()

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.ndim == 0 else repr(self), spec)

    def __len__(self) -> int:
        if not self.shape:
            raise ArrayTypeError(
                f"len({self!r}): an array without dimensions has no length. Use x.item() for its "
                "value."
            )
        return self.shape[0]

    # -- its end

    def delete(self) -> None:
        """Free the workers' buffers now, not when the handle is dropped."""
        for copy in self.take():
            copy.mesh.release(copy.number)

    def take(self) -> tuple[Copy, ...]:
        """Empty the handle and return its copies, which a step uses up."""
        copies, self._copies = self._copies, ()
        self._known = None
        return copies

    def __del__(self) -> None:
        # May run in any thread, at any time: it only appends to a list.
        for copy in getattr(self, "_copies", ()):
            copy.mesh.release(copy.number)

    def first(self) -> Copy:
        """The copy that is fetched and saved, or the first part."""
        if not self._copies:
            raise deleted_error(self)
        return self._copies[0]

    # -- refused operations

    def __getitem__(self, index: Any) -> Any:
        raise _refused(self, "indexed")

    def __iter__(self) -> Any:
        raise _refused(self, "iterated over")

    def __hash__(self) -> int:
        return id(self)


def deleted_error(array: DistributedArray) -> ArgumentError:
    return ArgumentError(
        f"this {array!r} is deleted: a step that returns updated state takes over the "
        "buffers of the old one (donate_argnums='auto'), or the cluster was shut down. Use "
        "the state that the step returned, or keep the old one with "
        "parallelize(…, donate_argnums=())."
    )


def _refused(array: DistributedArray, what: str) -> ArgumentError:
    return ArgumentError(
        f"{array!r} is on workers or on several meshes and cannot be {what} here. Bring it to this "
        "process with np.asarray(x), or compute inside a function that autopar.parallelize runs."
    )


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: DistributedArray, *others: Any) -> Any:
        raise _refused(self, f"computed with ({name})")

    return method


_ARITHMETIC = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow "
    "rpow matmul rmatmul and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert "
    "lt le gt ge eq ne round iadd isub imul itruediv"
)
for _name in _ARITHMETIC.split():
    setattr(DistributedArray, f"__{_name}__", _refuse(_name))
