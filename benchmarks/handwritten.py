"""Shardings as an expert writes them by hand: the plans that autopar has to match.

Parameters are placed by a rule on their path; activations are annotated from outside the model,
by intercepting Flax modules (and, for the experts, einsums), so that the models themselves stay
free of shardings. All use one mesh with axes "x" (data, experts) and "y" (tensor).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ALL = ("x", "y")
_EINSUM = jnp.einsum


@dataclass(frozen=True)
class HandWritten:
    """A way to shard by hand. `parameter(path, shape)` gives a parameter's spec (optimizer
    moments follow unless `moment` is given), `activations` the spec of a module's output by the
    module's name, `einsums` the spec of an einsum's output by its subscripts."""

    name: str
    mesh_shape: tuple[int, int]
    parameter: Callable[[str, tuple[int, ...]], P]
    batch: P
    activations: dict[str, P] = field(default_factory=dict)
    einsums: dict[str, P] = field(default_factory=dict)
    moment: Callable[[str, tuple[int, ...]], P] | None = None

    def state_specs(self, state: Any) -> Any:
        def spec(path: Any, leaf: Any) -> P:
            text = jax.tree_util.keystr(path)
            own = self.parameter
            if ".mu" in text or ".nu" in text or ".trace" in text:
                own = self.moment or own
            return own(text, leaf.shape) if leaf.ndim else P()

        return jax.tree_util.tree_map_with_path(spec, state)

    @contextlib.contextmanager
    def annotate(self, mesh: Mesh) -> Iterator[None]:
        """Annotate activations of every Flax module that runs inside."""

        def constrain(value: Any, spec: P | None) -> Any:
            if spec is None or not hasattr(value, "ndim") or value.ndim < len(spec):
                return value
            return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

        def interceptor(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out = next_fun(*args, **kwargs)
            name = context.module.name or "model"
            if context.method_name == "attend":
                name = "logits"
            elif context.method_name != "__call__":
                return out
            stem = name.rstrip("0123456789")
            spec = self.activations.get(stem, self.activations.get("*"))
            if stem == "model":
                spec = self.activations.get("logits")
            return jax.tree.map(lambda v: constrain(v, spec), out)

        def einsum(subscripts: str, *operands: Any, **kwargs: Any) -> Any:
            out = _EINSUM(subscripts, *operands, **kwargs)
            return constrain(out, self.einsums.get(subscripts))

        with nn.intercept_methods(interceptor), mock.patch.object(jnp, "einsum", einsum):
            yield

    def jitted(self, train_step: Any, state: Any, devices: Any) -> tuple[Any, Mesh]:
        """`jax.jit` of the step with these shardings, state donated."""
        import numpy as np

        grid = np.array(devices, dtype=object).reshape(self.mesh_shape)
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = Mesh(grid, ("x", "y"), axis_types=auto)
        place = lambda tree: jax.tree.map(  # noqa: E731
            lambda s: NamedSharding(mesh, s), tree, is_leaf=lambda s: isinstance(s, P)
        )
        state_shardings = place(self.state_specs(state))

        def step(state: Any, batch: Any) -> Any:
            with self.annotate(mesh):
                return train_step(state, batch)

        return (
            jax.jit(
                step,
                in_shardings=(state_shardings, NamedSharding(mesh, self.batch)),
                out_shardings=(state_shardings, NamedSharding(mesh, P())),
                donate_argnums=0,
            ),
            mesh,
        )


def _replicated(path: str, shape: tuple[int, ...]) -> P:
    return P()


def _largest_dim(axes: Any, num_shards: int) -> Callable[[str, tuple[int, ...]], P]:
    """FSDP: every parameter split along its largest dimension that divides."""

    def spec(path: str, shape: tuple[int, ...]) -> P:
        divisible = [d for d, n in enumerate(shape) if n % num_shards == 0]
        if not divisible or len(shape) < 2:
            return P()
        best = max(divisible, key=lambda d: shape[d])
        return P(*[axes if d == best else None for d in range(len(shape))])

    return spec


def data_parallel(num_devices: int) -> HandWritten:
    tokens = P(ALL, None, None)
    return HandWritten("data parallel", (num_devices, 1), _replicated, P(ALL), {"*": tokens})


def fsdp(num_devices: int) -> HandWritten:
    tokens = P(ALL, None, None)
    return HandWritten(
        "FSDP (ZeRO-3)",
        (num_devices, 1),
        _largest_dim(ALL, num_devices),
        P(ALL),
        {"*": tokens},
    )


def zero2(num_devices: int) -> HandWritten:
    """Parameters whole, moments (and so gradients) split."""
    base = fsdp(num_devices)
    return HandWritten(
        "ZeRO-2", base.mesh_shape, _replicated, base.batch, base.activations, moment=base.parameter
    )


def megatron(data: int, tensor: int, *, sequence: bool, zero: bool = False) -> HandWritten:
    """Column- and row-split kernels on "y", batch on "x"; with `sequence` the residual stream is
    split along the sequence between them; with `zero` kernels are also split over "x"."""

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        if len(shape) < 2:
            column = "'qkv'" in path or "'up'" in path
            return P("y") if column and shape[0] % tensor == 0 else P()
        other = "x" if zero and data > 1 else None
        if "embedding" in path:
            return P("y", other)
        if "positions" in path:
            return P()
        if "'qkv'" in path or "'up'" in path:
            return P(other, "y")
        if "'out'" in path or "'down'" in path:
            return P("y", other)
        return P()

    stream = P("x", "y", None) if sequence else P("x", None, None)
    whole = P("x", None, None)
    split = P("x", None, "y")
    activations = {
        "*": stream, "qkv": split, "up": split, "logits": split, "out": stream, "down": stream,
        "attention_norm": whole, "ffn_norm": whole, "final_norm": whole,
    }  # fmt: skip
    name = f"Megatron {data}×{tensor}" + (" + sequence" if sequence else "")
    return HandWritten(
        name + (" + ZeRO-3" if zero else ""), (data, tensor), parameter, P("x"), activations
    )


def expert_parallel(num_devices: int, *, zero: bool) -> HandWritten:
    """Experts split over all devices, tokens exchanged by all-to-all; the rest data parallel,
    with ZeRO-3 or not."""
    rest = _largest_dim(ALL, num_devices) if zero else _replicated

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        if "'experts'" in path and len(shape) == 3:
            return P(ALL, None, None)
        return rest(path, shape)

    tokens = P(ALL, None, None)
    experts = P(ALL, None, None, None)
    einsums = {
        "gsec,gsm->egcm": experts,
        "egcm,emh->egch": experts,
        "egch,ehm->egcm": experts,
        "gsec,egcm->gsm": tokens,
    }
    name = "expert parallel" + (" + ZeRO-3" if zero else "")
    return HandWritten(name, (num_devices, 1), parameter, P(ALL), {"*": tokens}, einsums)
