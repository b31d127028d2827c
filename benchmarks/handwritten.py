"""Shardings as an expert writes them by hand: the plans that autopar has to match.

Parameters are placed by a rule on their path; activations are annotated from outside the model,
by intercepting Flax modules, linen's and nnx's (and, for the experts, einsums), so that the models
themselves stay free of shardings. All use one mesh with axes "x" (data, experts) and "y" (tensor).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.models import llama

ALL = ("x", "y")
_EINSUM = jnp.einsum
_NNX_MODULES = (
    llama.Llama, llama.LlamaLayer, llama.LlamaAttention, llama.LlamaFeedForward,
    nnx.Linear, nnx.Embed, nnx.RMSNorm,
)  # fmt: skip


@dataclass(frozen=True)
class HandWritten:
    """A way to shard by hand. `parameter(path, shape)` gives a parameter's spec (optimizer
    moments follow unless `moment` is given), `activations` the spec of a module's output by the
    module's name (or that without the number at its end; "*" for all others, "logits" for the
    whole model), `einsums` the spec of an einsum's output by its subscripts. Where there are
    several specs, the output is passed through them in turn."""

    name: str
    mesh_shape: tuple[int, int]
    parameter: Callable[[str, tuple[int, ...]], P]
    batch: P
    activations: dict[str, P | list[P]] = field(default_factory=dict)
    einsums: dict[str, P | list[P]] = field(default_factory=dict)
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
            return out

        def einsum(subscripts: str, *operands: Any, **kwargs: Any) -> Any:
            out = _EINSUM(subscripts, *operands, **kwargs)
            for spec in _in_turn(self.einsums.get(subscripts, [])):
                out = constrain(out, spec)
            return out

        with contextlib.ExitStack() as stack:
            stack.enter_context(nn.intercept_methods(interceptor))
            stack.enter_context(mock.patch.object(jnp, "einsum", einsum))
            stack.enter_context(intercept_nnx(annotated))
            yield

    def specs_of(self, module: str) -> list[P]:
        """What the output of the module with this name is passed through."""
        if module == "model":
            module = "logits" if "logits" in self.activations else ""
        stem = module.rstrip("0123456789")
        for name in (module, stem, "*" if module else ""):
            if name in self.activations:
                return _in_turn(self.activations[name])
        return []

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


def _in_turn(specs: P | list[P]) -> list[P]:
    return [specs] if isinstance(specs, P) else specs


@contextlib.contextmanager
def intercept_nnx(annotated: Callable[[Any, str], Any]) -> Iterator[None]:
    """Pass what nnx modules return through `annotated`, with the name that the module has in the
    one that calls it; the outermost is "model"."""
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
                for child in children:  # another module may get this address
                    del names[child]

        return __call__

    with contextlib.ExitStack() as stack:
        for kind in _NNX_MODULES:
            patch = mock.patch.object(kind, "__call__", wrapped(kind.__call__))
            stack.enter_context(patch)
        yield


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
    tokens, by_token = P(ALL, None, None), P(None, ALL)
    return HandWritten(
        "FSDP (ZeRO-3)",
        (num_devices, 1),
        _largest_dim(ALL, num_devices),
        P(ALL),
        {"*": tokens},
        _expert_einsums(by_token, by_token, by_token, tokens),
    )


def zero2(num_devices: int) -> HandWritten:
    """Parameters whole, moments (and so gradients) split."""
    base = fsdp(num_devices)
    return HandWritten(
        "ZeRO-2", base.mesh_shape, _replicated, base.batch, base.activations, moment=base.parameter
    )


def _expert_einsums(by_token: P, by_expert: P, inside: P, tokens: P) -> dict[str, P | list[P]]:
    """Of a mixture: slots are filled and emptied where their tokens are, and go to the experts in
    between. Told only the latter, XLA gathers all tokens everywhere."""
    return {
        "gsec,gsm->egcm": [by_token, by_expert],
        "egcm,emh->egch": inside,
        "egch,ehm->egcm": [by_expert, by_token],
        "gsec,egcm->gsm": tokens,
    }


_COLUMN = ("'qkv'", "'query'", "'key'", "'value'", "'up'", "'gate'", "'lm_head'")
_ROW = ("'out'", "'down'")


def megatron(data: int, tensor: int, *, sequence: bool, zero: bool = False) -> HandWritten:
    """Column- and row-split kernels on "y", batch on "x"; with `sequence` the residual stream is
    split along the sequence between them; with `zero` kernels are also split over "x". Experts, if
    there are any, are split over "x" and inside over "y", tokens exchanged by all-to-all."""

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        column = any(name in path for name in _COLUMN)
        if len(shape) < 2:
            return P("y") if column and shape[0] % tensor == 0 else P()
        other = "x" if zero and data > 1 else None
        if "'experts'" in path and len(shape) == 3:
            return P("x", None, "y") if column else P("x", "y", None)
        if "embedding" in path:
            return P("y", other)
        if column:
            return P(other, "y")
        if any(name in path for name in _ROW):
            return P("y", other)
        return P()

    stream = P("x", "y", None) if sequence else P("x", None, None)
    whole = P("x", None, None)
    split = P("x", None, "y")
    # Computed in parts and gathered as it comes out: what is inside of a norm is float32.
    norm = [stream, whole] if sequence else whole
    activations = {
        "*": stream, "logits": split, "lm_head": split, "out": stream, "down": stream,
        "qkv": split, "query": split, "key": split, "value": split, "up": split, "gate": split,
        "attention_norm": norm, "ffn_norm": norm, "final_norm": norm,
        "dense_attention_norm": norm, "expert_attention_norm": norm, "experts_norm": norm,
        "router": whole,
    }  # fmt: skip
    einsums = {
        # Left alone, XLA splits some of attention along the sequence instead of by heads.
        "bqnd,bknd->bnqk": P("x", "y", None, None),
        "bnqk,bknd->bqnd": P("x", None, "y", None),
        "bqngd,bknd->bngqk": P("x", "y", None, None, None),
        "bngqk,bknd->bqngd": P("x", None, "y", None, None),
        **_expert_einsums(P(None, "x"), P("x", None, None, None), P("x", None, None, "y"), whole),
    }
    name = f"Megatron {data}×{tensor}" + (" + sequence" if sequence else "")
    return HandWritten(
        name + (" + ZeRO-3" if zero else ""),
        (data, tensor),
        parameter,
        P("x"),
        activations,
        einsums,
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
    einsums = _expert_einsums(P(None, ALL), experts, experts, tokens)
    name = "expert parallel" + (" + ZeRO-3" if zero else "")
    return HandWritten(name, (num_devices, 1), parameter, P(ALL), {"*": tokens}, einsums)


def experts_in_hosts(data: int, experts: int) -> HandWritten:
    """For more devices than experts: experts split over "y", inside over "x" as ZeRO-3 does; the
    rest ZeRO-3 over all devices. Tokens are exchanged along "y" alone."""
    rest = _largest_dim(ALL, data * experts)

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        if "'experts'" in path and len(shape) == 3:
            return P("y", None, "x") if "'up'" in path else P("y", "x", None)
        return rest(path, shape)

    tokens = P(ALL, None, None)
    by_expert = P("y", "x", None, None)
    einsums = _expert_einsums(P(None, ALL), by_expert, by_expert, tokens)
    name = f"expert parallel {data}×{experts} + ZeRO-3"
    return HandWritten(name, (data, experts), parameter, P(ALL), {"*": tokens}, einsums)


def image_fsdp(num_devices: int) -> HandWritten:
    """FSDP of a convolutional network: images split over all devices."""
    parameter = _largest_dim(ALL, num_devices)
    return HandWritten("FSDP (ZeRO-3)", (num_devices, 1), parameter, P(ALL), {"*": P(ALL)})


def image_zero2(num_devices: int) -> HandWritten:
    moment = _largest_dim(ALL, num_devices)
    return HandWritten(
        "ZeRO-2", (num_devices, 1), _replicated, P(ALL), {"*": P(ALL)}, moment=moment
    )


def image_channels(data: int, tensor: int) -> HandWritten:
    """Megatron's columns and rows in the bottleneck blocks of a Wide-ResNet, with ZeRO-3 on "x".

    A block's 3×3 convolution makes channels that are split over "y" and the last one adds them up.
    The first one is split too, and its output, a quarter of the residual stream, gathered."""

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        if len(shape) == 2:
            return P("x", None)
        if len(shape) < 4:
            return P()
        if "'Conv_2'" in path:
            return P(None, None, "y", "x")
        if "'stem'" in path:  # three channels of colour
            return P()
        return P(None, None, "x", "y")

    whole = P("x", None, None, None)
    split = P("x", None, None, "y")
    activations = {
        "*": whole, "Conv_0": split, "Conv_1": split, "BatchNorm_1": split, "shortcut": split,
        "head": P("x", None),
    }  # fmt: skip
    name = f"channels {data}×{tensor} + ZeRO-3"
    return HandWritten(name, (data, tensor), parameter, P("x"), activations)
