"""A hand-written sharding: specs of parameters, annotations of activations.

    HandWritten, a model's step and state → `jax.jit` of the step with shardings

A rule on the path places each parameter. Activations are annotated from outside the model, by
intercepting Flax modules (linen's and nnx's) and einsums, so the models themselves contain no
shardings. Meshes have the axes "x" and "y"; "y" is the inner one, whose devices are neighbours.
Layers may be stacked (`scan_layers`): rules apply to the arrays of one layer.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.models import llama

ALL = ("x", "y")
_EINSUM = jnp.einsum
_NNX_MODULES = (
    llama.Llama, llama.LlamaLayer, llama.LlamaAttention, llama.LlamaFeedForward,
    nnx.Linear, nnx.Embed, nnx.RMSNorm,
)  # fmt: skip
_MOMENTS = (".mu", ".nu", ".trace", ".sum_of_squares")

Rule = Callable[[str, tuple[int, ...]], P]
Specs = P | list[P]


@dataclass(frozen=True)
class HandWritten:
    """A hand-written sharding. `parameter(path, shape)` returns a parameter's spec (optimizer
    moments follow unless `moment` is given). `activations` has the specs of module outputs by
    module name (with or without the number at its end; "*" for all others, "logits" for the whole
    model), `einsums` those of einsum outputs by subscripts. An output with several specs passes
    through them in turn."""

    name: str
    mesh_shape: tuple[int, int]
    parameter: Rule
    batch: P
    activations: dict[str, Specs] = field(default_factory=dict)
    einsums: dict[str, Specs] = field(default_factory=dict)
    moment: Rule | None = None

    def state_specs(self, state: Any, *, stacked: bool = False) -> Any:
        """A spec for each leaf of the state; with `stacked`, arrays of layers have a leading layer
        dimension, which is never split."""

        def spec(path: Any, leaf: Any) -> P:
            text = jax.tree_util.keystr(path)
            rule = self.parameter
            if any(name in text for name in _MOMENTS):
                rule = self.moment or rule
            if stacked and "['layers']" in text:
                return P(None, *rule(text, leaf.shape[1:])) if leaf.ndim > 1 else P()
            return rule(text, leaf.shape) if leaf.ndim else P()

        return jax.tree_util.tree_map_with_path(spec, state)

    @contextlib.contextmanager
    def annotate(self, mesh: Mesh, saved: Sequence[str] = ()) -> Iterator[None]:
        """Annotates the activations of every Flax module that runs in the block. Outputs of the
        modules and einsums in `saved` get that name for a `jax.checkpoint` policy."""

        def constrain(value: Any, spec: P) -> Any:
            if not hasattr(value, "ndim") or value.ndim < len(spec):
                return value
            return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

        def interceptor(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out = next_fun(*args, **kwargs)
            name = context.module.name or "model"
            if context.method_name == "attend":
                name = "logits"
            elif context.method_name != "__call__":
                return out
            return annotated(out, name)

        def annotated(out: Any, name: str) -> Any:
            for spec in self.specs_of(name):
                out = jax.tree.map(functools.partial(constrain, spec=spec), out)
            return checkpoint_name(out, name) if name in saved else out

        def einsum(subscripts: str, *operands: Any, **kwargs: Any) -> Any:
            out = _EINSUM(subscripts, *operands, **kwargs)
            for spec in _in_turn(self.einsums.get(subscripts, [])):
                out = constrain(out, spec)
            return checkpoint_name(out, subscripts) if subscripts in saved else out

        with contextlib.ExitStack() as stack:
            stack.enter_context(nn.intercept_methods(interceptor))
            stack.enter_context(mock.patch.object(jnp, "einsum", einsum))
            stack.enter_context(intercept_nnx(annotated))
            yield

    def specs_of(self, module: str) -> list[P]:
        """The specs for the output of the module with this name."""
        if module == "model":
            module = "logits" if "logits" in self.activations else ""
        stem = module.rstrip("0123456789")
        for name in (module, stem, "*" if module else ""):
            if name in self.activations:
                return _in_turn(self.activations[name])
        return []

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """A mesh of the first devices, in their order."""
        taken = np.array(list(devices)[: math.prod(self.mesh_shape)], dtype=object)
        auto = (jax.sharding.AxisType.Auto,) * 2
        return Mesh(taken.reshape(self.mesh_shape), ALL, axis_types=auto)

    def state_shardings(self, state: Any, mesh: Mesh, *, stacked: bool = False) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            self.state_specs(state, stacked=stacked),
            is_leaf=lambda spec: isinstance(spec, P),
        )

    def jitted(self, train_step: Any, state: Any, devices: Any) -> tuple[Any, Mesh]:
        """`jax.jit` of the step with these shardings, state donated."""
        mesh = self.mesh(devices)

        def step(state: Any, batch: Any) -> Any:
            with self.annotate(mesh):
                return train_step(state, batch)

        return self.jit_on(step, mesh, self.state_shardings(state, mesh)), mesh

    def jit_on(self, step: Any, mesh: Mesh, state_shardings: Any) -> Any:
        return jax.jit(
            step,
            in_shardings=(state_shardings, NamedSharding(mesh, self.batch)),
            out_shardings=(state_shardings, NamedSharding(mesh, P())),
            donate_argnums=0,
        )


def _in_turn(specs: Specs) -> list[P]:
    return [specs] if isinstance(specs, P) else specs


@contextlib.contextmanager
def intercept_nnx(annotated: Callable[[Any, str], Any]) -> Iterator[None]:
    """Passes the outputs of nnx modules through `annotated`, with the module's name in its caller;
    the outermost is "model"."""
    names: dict[int, str] = {}
    depth = 0

    def wrapped(call: Any) -> Any:
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            name = names.get(id(module), type(module).__name__ if depth else "model")
            children = {id(c): n for n, c in vars(module).items() if isinstance(c, nnx.Module)}
            names.update(children)
            depth += 1
            try:
                return annotated(call(module, *args, **kwargs), name)
            finally:
                depth -= 1
                for child in children:  # another module may reuse this address
                    del names[child]

        return __call__

    with contextlib.ExitStack() as stack:
        for kind in _NNX_MODULES:
            patch = mock.patch.object(kind, "__call__", wrapped(kind.__call__))
            stack.enter_context(patch)
        yield


# -- shared rules


def replicated(path: str, shape: tuple[int, ...]) -> P:
    return P()


def largest_dim(axes: Any, num_shards: int) -> Rule:
    """FSDP: splits every parameter along its largest divisible dimension."""

    def spec(path: str, shape: tuple[int, ...]) -> P:
        divisible = [d for d, n in enumerate(shape) if n % num_shards == 0]
        if not divisible or len(shape) < 2:
            return P()
        best = max(divisible, key=lambda d: shape[d])
        return P(*[axes if d == best else None for d in range(len(shape))])

    return spec
