"""The only file that uses JAX's internals, so that a new JAX release breaks one file.

The rest of autopar sees primitives, parameters and abstract values only through these functions.
`_requirements.py` lists every internal used here and checks them first: the error for a JAX that
lacks one names it.
"""
# ruff: noqa: E402

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import jax

from autopar import _requirements

_requirements.check_jax()

from jax._src import array as _array
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src import source_info_util as _source_info
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir import ir as mlir_ir
from jax._src.lib.mlir import passmanager as _passmanager
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.extend.core import Primitive as _Primitive
from jax.interpreters import ad as _ad
from jax.interpreters import batching as _batching
from jax.interpreters import mlir as _mlir

from autopar.errors import ClusterError

Literal = _core.Literal
JaxprEqn = _core.JaxprEqn
EquationContext = _core.JaxprEqnContext
NameStack = _source_info.NameStack
Primitive = _Primitive
ShapedArray = _core.ShapedArray
SourceInfo = _source_info.SourceInfo
_T = TypeVar("_T")

# Call-like primitives that are inlined, and the parameter with their body. Names differ between
# releases (`closed_call` became `eval_jaxpr` in 0.11, `pjit` became `jit`).
_CALL_BODY = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": None,
}


class Parameters(dict[str, Any]):
    """Parameters of an equation. Looking up one that JAX no longer has is a `DependencyError`."""

    def __init__(self, primitive: str, params: dict[str, Any]) -> None:
        super().__init__(params)
        self._primitive = primitive

    def __missing__(self, name: str) -> Any:
        raise _requirements.lacking(f"parameter {name!r} of the primitive {self._primitive!r}")


def parameters(eqn: JaxprEqn) -> Parameters:
    return Parameters(eqn.primitive.name, eqn.params)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, as (jaxpr, constants)."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, tuple(getattr(jaxpr, "consts", ()) or ())


def call_body(eqn: JaxprEqn) -> Any | None:
    """The body of a call-like equation that may be inlined, else None."""
    if eqn.primitive.name == "custom_linear_solve":
        return parameters(eqn)["jaxprs"].solve
    if eqn.primitive.name == "call_hi_primitive":  # JAX 0.12: expanded only when it is lowered
        operands: list[Any] = [v.aval for v in eqn.invars]
        avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]
        return jax.make_jaxpr(lambda *a: eqn.primitive.to_lojax(*a, **eqn.params))(*avals)
    parameter = _CALL_BODY.get(eqn.primitive.name)
    if parameter is None:
        return None
    return eqn.params.get(parameter) or eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")


def call_operands(eqn: JaxprEqn) -> range | list[int]:
    """The operands of a call-like equation that its body takes, in order. The body of a custom
    solve takes its own constants, which are between those of the derivatives, and the right-hand
    sides."""
    if eqn.primitive.name != "custom_linear_solve":
        return range(len(eqn.invars))
    matvec, vecmat, solve, transpose_solve = parameters(eqn)["const_lengths"]
    first = matvec + vecmat
    rest = first + solve + transpose_solve
    return [*range(first, first + solve), *range(rest, len(eqn.invars))]


def remat_barrier_mask(eqn: JaxprEqn) -> tuple[bool, ...]:
    """Which operands of a `jax.checkpoint` equation JAX shields from common-subexpression
    elimination when it lowers it; all False for other equations."""
    none = (False,) * len(eqn.invars)
    if eqn.primitive.name not in ("remat2", "checkpoint") or not eqn.params.get("differentiated"):
        return none
    prevent_cse = eqn.params.get("prevent_cse", True)
    return (prevent_cse,) * len(none) if isinstance(prevent_cse, bool) else tuple(prevent_cse)


def optimization_barrier_primitive() -> Primitive:
    from jax._src.lax.lax import optimization_barrier_p

    return optimization_barrier_p


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def bind(primitive: Primitive, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Apply a primitive as JAX's own jaxpr evaluation does; always a list of results."""
    bind_params = primitive.get_bind_params(params)
    if isinstance(bind_params, tuple):  # releases where sub-functions are passed positionally
        subfuns, bind_params = bind_params
        results = primitive.bind(*subfuns, *operands, **bind_params)
    else:
        results = primitive.bind(*operands, **bind_params)
    return list(results) if primitive.multiple_results else [results]


# cuDNN's fused attention as JAX binds it, and the kernels inside.
FUSED_ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
_KERNELS = ("dot_product_attention_fwd", "dot_product_attention_bwd")


def bind_kernel(primitive: Primitive, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """As `bind`, but fused attention binds its kernel alone: JAX wraps that in a partitioning
    callback into the compiling process."""
    if primitive.name in FUSED_ATTENTION:
        return list(primitive.impl(*operands, **params))
    return bind(primitive, params, operands)


@contextlib.contextmanager
def kernels_without_devices() -> Iterator[None]:
    """Allows lowering the kernels of fused attention for absent devices. JAX requires devices for
    them, as for all primitives with their own partitioning, though they are plain custom calls."""
    needing = _dispatch.prim_requires_devices_during_lowering
    with _KERNELS_LOCK:
        allowed = {primitive for primitive in needing if primitive.name in _KERNELS}
        needing -= allowed
        try:
            yield
        finally:
            needing |= allowed


_KERNELS_LOCK = threading.Lock()
_ABSENT_LOCK = threading.RLock()
# What tracing assumes of a GPU that is not there: nothing that a newer one could do is refused.
_ABSENT_CUDNN = 99999


@contextlib.contextmanager
def kernels_of_absent_gpus() -> Iterator[None]:
    """Allows tracing cuDNN's attention where there is no GPU. JAX asks cuDNN for its version and
    the GPU for its capability while it traces; without one, it stops. An installed cuDNN and a
    present GPU are asked as before."""
    from jax._src import xla_bridge
    from jax._src.cudnn import fused_attention_stablehlo as fused

    ask_version, ask_capability = fused.check_cudnn_version, fused.check_compute_capability

    def version() -> int:
        return _ABSENT_CUDNN if fused.cuda_versions is None else ask_version()

    def is_capable(capability: str) -> bool:
        has_gpu = "cuda" in xla_bridge.get_backend().platform_version
        return ask_capability(capability) if has_gpu else True

    with _ABSENT_LOCK:
        fused.check_cudnn_version, fused.check_compute_capability = version, is_capable
        try:
            yield
        finally:
            fused.check_cudnn_version = ask_version
            fused.check_compute_capability = ask_capability


def kernel_platforms(name: str, params: dict[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """(what it is, the platforms that it runs on) of a kernel that is made for some; else None."""
    if name.startswith("dot_product_attention"):
        return "cuDNN's attention", ("gpu",)
    if name.startswith("scaled_matmul"):
        return "cuDNN's scaled product", ("gpu",)
    if name == "pallas_call" and not params.get("interpret"):
        return "a Pallas kernel", ("gpu", "tpu")
    return None


def primitives_that_need_devices(jaxpr: _core.Jaxpr) -> set[str]:
    """Names of primitives that JAX lowers only for present devices."""
    names = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive in _dispatch.prim_requires_devices_during_lowering:
            names.add(eqn.primitive.name)
        for inner in _core.jaxprs_in_params(eqn.params):
            names |= primitives_that_need_devices(inner)
    return names


def given_devices(name: str, params: dict[str, Any]) -> tuple[Any, ...] | None:
    """The devices that the user gave to a `shard_map` or a sharding constraint; None for other
    equations, and for meshes without devices."""
    if name == "shard_map":
        mesh = params.get("mesh")
    elif name == "sharding_constraint":
        mesh = getattr(params.get("sharding"), "mesh", None)
    else:
        return None
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
        return None
    return tuple(mesh.devices.flat)


@contextlib.contextmanager
def equation_context(
    source_info: SourceInfo, name_stack: NameStack, eqn_ctx: EquationContext
) -> Iterator[None]:
    """Bind under the user's traceback and module names, so profiles and HLO keep them."""
    stack = _source_info.current_name_stack() + name_stack
    with _source_info.user_context(source_info.traceback, name_stack=stack), eqn_ctx.manager:
        yield


def empty_name_stack() -> NameStack:
    return _source_info.NameStack()


def below_name(name: str, name_stack: NameStack) -> NameStack:
    """A name stack with one more name around it."""
    return _source_info.NameStack().extend(name) + name_stack


def first_name(name_stack: NameStack) -> str | None:
    """The outermost name in a stack that is not JAX's; None if there is none."""
    return next((x.name for x in name_stack.stack if _is_name(x)), None)


def renamed_first(name_stack: NameStack, name: str, new: str) -> NameStack:
    """The stack with `new` in place of its outermost name, or around all names if the outermost is
    not `name`."""
    stack = name_stack.stack
    for index, element in enumerate(stack):
        if _is_name(element):
            if element.name != name:
                break
            return type(name_stack)((*stack[:index], type(element)(new), *stack[index + 1 :]))
    return below_name(new, name_stack)


def _is_name(element: Any) -> bool:
    is_scope = isinstance(element, _source_info.Scope)
    return is_scope and element.name not in ("checkpoint", "rematted_computation")


def source_line(source_info: SourceInfo) -> str:
    """`file.py:12 (function)`: the user's code behind an equation."""
    return _source_info.summarize(source_info)


def line_of_user(tracebacks: tuple[Any, ...]) -> str:
    """`models/gpt.py:12 (Block.__call__)`: the innermost frame outside installed packages, or else
    the innermost; "" if there is none. Takes the tracebacks of an equation and of the calls around
    it, the innermost first."""
    frames = [
        f
        for traceback in tracebacks
        if traceback is not None
        for f in _source_info.user_frames(traceback)
    ]
    if not frames:
        return ""
    installed = ("site-packages", "dist-packages")
    outside_packages = (f for f in frames if not any(part in f.file_name for part in installed))
    frame = next(outside_packages, frames[0])
    file = "/".join(frame.file_name.replace("\\", "/").split("/")[-2:])
    return f"{file}:{frame.start_line} ({frame.function_name.replace('.<locals>', '')})"


def code_behind(tracebacks: Iterable[Any], outermost: CodeType) -> set[CodeType]:
    """The code of all functions outside JAX that ran while the equations of these tracebacks were
    made, below the function with the code `outermost`."""
    installed, found = str(Path(jax.__file__).parent), set()
    for traceback in {t for t in tracebacks if t is not None}:
        for code in traceback.raw_frames()[0]:  # the innermost first
            if code is outermost:
                break
            if not code.co_filename.startswith(installed):
                found.add(code)
    return found


def context_settings(context: EquationContext) -> tuple[Any, ...]:
    """What an equation's context sets: memory, random numbers, notes for XLA."""
    metadata = context.xla_metadata or {}
    return (
        str(context.compute_type),
        bool(context.threefry_partitionable),
        sorted((str(key), str(value)) for key, value in dict(metadata).items()),
    )


def is_extended_dtype(dtype: Any) -> bool:
    """True for PRNG keys and other dtypes that have no numpy equivalent."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def is_mutable(aval: Any) -> bool:
    """True for references (`jax.new_ref`), whose value changes in place."""
    return isinstance(aval, _AbstractRef)


_RULE_PASS = "sdy-populate-op-sharding-rules"


def populate_sharding_rules(module: Any) -> None:
    """Run Shardy's rule pass: every op of every function gains an `sdy.sharding_rule`."""
    with module.context:
        try:
            rules = _passmanager.PassManager.parse(f"builtin.module(func.func({_RULE_PASS}))")
        except ValueError as error:
            raise _requirements.lacking(f"MLIR pass {_RULE_PASS}") from error
        rules.run(module.operation)


def is_tracing() -> bool:
    """Whether the caller is being traced (a parallelized step inside `jax.jit`)."""
    return not _core.trace_state_clean()


def has_devices() -> bool:
    """Whether this process has initialized its devices."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def installed_versions(platform: str) -> dict[str, str]:
    """Versions of jax and jaxlib; on GPUs also of CUDA, cuDNN and the newest CUDA that the driver
    supports."""
    from jax._src import lib

    versions = {"jax": jax.__version__, "jaxlib": lib.version_str}
    cuda = lib.cuda_versions
    if platform == "gpu" and cuda is not None:
        for name, ask in (
            ("cuda", "cuda_runtime_get_version"),
            ("cudnn", "cudnn_get_version"),
            ("driver", "cuda_driver_get_version"),
        ):
            with contextlib.suppress(AttributeError, RuntimeError):
                versions[name] = str(getattr(cuda, ask)())
    return versions


def op_result_or_none(value: Any) -> Any | None:
    """The op that defines an SSA value, or None for a block argument."""
    return None if isinstance(value.owner, mlir_ir.Block) else value.owner


def fresh_mesh(devices: Any, axis_names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh whose axes the partitioner may use freely (`AxisType.Auto`)."""
    auto = (jax.sharding.AxisType.Auto,) * len(axis_names)
    return jax.sharding.Mesh(devices, axis_names, axis_types=auto)


def abstract_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> jax.sharding.AbstractMesh:
    """The same mesh without devices, for tracing and lowering."""
    auto = (jax.sharding.AxisType.Auto,) * len(axis_names)
    return jax.sharding.AbstractMesh(shape, axis_names, axis_types=auto)


def gpu_topology_devices(num_hosts: int, devices_per_host: int, target_config: str) -> list[Any]:
    """Devices of a GPU cluster that need not exist, to compile programs for."""
    _requirements.require(_requirements.VERIFY)
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"{num_hosts}x{devices_per_host}x1",
        target_config=target_config,
    )
    return list(description.devices)


def row_major(array: jax.Array) -> jax.Array:
    """The array with its last dimension contiguous in memory, whatever XLA would choose."""
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def scan_primitive() -> Primitive:
    from jax._src.lax.control_flow.loops import scan_p

    return scan_p


def draws_bits_by_position(key_dtype: Any) -> bool:
    """Whether a key's random bits are a hash of (key, position), so that any part of an array can
    be computed alone: threefry keys in their partitionable form (the default)."""
    if not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        return False
    return getattr(getattr(key_dtype, "_impl", None), "name", "") == "threefry2x32"


def draws_bits_by_philox(key_dtype: Any) -> bool:
    """Whether XLA's generator draws a key's random bits."""
    name = getattr(getattr(key_dtype, "_impl", None), "name", "")
    return name in ("rbg", "unsafe_rbg")


def threefry_bits(key: Any, high: Any, low: Any, bit_width: int) -> Any:
    """The bits of `jax.random.bits` at the given positions (64 bits in two words)."""
    from jax.extend.random import threefry2x32_p

    first, second = jax.random.key_data(key)
    bits_high, bits_low = threefry2x32_p.bind(first, second, high, low)
    if bit_width == 64:
        wide = jax.numpy.uint64
        return (bits_high.astype(wide) << 32) | bits_low.astype(wide)
    return (bits_high ^ bits_low).astype(f"uint{bit_width}")


def array_aval(shape: Sequence[int], dtype: Any) -> ShapedArray:
    return _core.ShapedArray(tuple(shape), dtype)


def stacked_aval(aval: ShapedArray, length: int) -> ShapedArray:
    """The type of `length` arrays of one type, stacked."""
    return array_aval((length, *aval.shape), aval.dtype)


def unstacked_aval(aval: ShapedArray) -> ShapedArray:
    return array_aval(aval.shape[1:], aval.dtype)


def resized_aval(aval: ShapedArray, shape: Sequence[int]) -> ShapedArray:
    return aval.update(shape=tuple(shape))


# -- named values

# An identity with a name. Its derivative is the plain identity: the name belongs to the value, not
# to its tangent or cotangent. `vmapped`: dimensions that `vmap` added.
CONSTRAIN = "constrain"
_constrain = _Primitive(CONSTRAIN)
_constrain.def_impl(lambda x, **_: x)
_constrain.def_abstract_eval(lambda x, **_: x)
_mlir.register_lowering(_constrain, lambda ctx, x, **_: [x])


def named(x: Any, name: str) -> Any:
    """The array itself, with a name in the traced program."""
    return _constrain.bind(x, name=name, vmapped=())


def _named_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return _constrain.bind(*primals, **params), tangents[0]


def _named_batch(args: Any, dims: Any, *, name: str, vmapped: tuple[int, ...]) -> Any:
    (x,), (dim,) = args, dims
    shifted = (d + (d >= dim) for d in vmapped)
    return _constrain.bind(x, name=name, vmapped=tuple(sorted((*shifted, dim)))), dim


_ad.primitive_jvps[_constrain] = _named_jvp
_ad.primitive_transposes[_constrain] = lambda cotangent, _, **__: (cotangent,)
_batching.primitive_batchers[_constrain] = _named_batch


# -- marks between layers

# A mark has no operands and no results: its own effect keeps it in place through jit, derivatives,
# vmap and checkpoint. It is lowered to nothing.
LAYER_BOUNDARY = "layer_boundary"
_CONTROL_FLOW = str(Path(jax.__file__).parent / "_src" / "lax" / "control_flow")
_LOOP_FUNCTIONS = ("scan", "while_loop", "fori_loop", "map", "cond", "switch", "associative_scan")


class _BoundaryEffect(_effects.Effect):
    def __str__(self) -> str:
        return LAYER_BOUNDARY


_BOUNDARY_EFFECT = _BoundaryEffect()
for _allowed in (
    _effects.lowerable_effects,
    _effects.control_flow_allowed_effects,
    _effects.custom_derivatives_allowed_effects,
    _effects.remat_allowed_effects,
):
    _allowed.add_type(_BoundaryEffect)
_boundary = _Primitive(LAYER_BOUNDARY)
_boundary.multiple_results = True
_boundary.def_impl(lambda **_: [])
_boundary.def_effectful_abstract_eval(lambda **_: ([], {_BOUNDARY_EFFECT}))
_mlir.register_lowering(_boundary, lambda _, **__: [])
for _file in ("_jax.py", "api.py"):  # a mark has the line of the user's call
    _source_info.register_exclusion(str(Path(__file__).with_name(_file)))


def mark_boundary() -> None:
    """Adds a mark to the program being traced, with the caller's source line. The mark records the
    loop around it, since JAX moves equations without operands out of loops."""
    _boundary.bind(loop=_loop_around())


def call_step(function: Callable[..., _T], *args: Any) -> _T:
    """Calls the function. The tracer calls the user's step through here, so that marks can tell
    loops of the step from loops around the call."""
    return function(*args)


def _loop_around() -> str | None:
    """The outermost loop function of JAX, such as `scan`, that traces a body of the step."""
    frame: Any = sys._getframe(1)
    outermost = None
    while frame is not None and frame.f_code is not call_step.__code__:
        code = frame.f_code
        if code.co_name in _LOOP_FUNCTIONS and code.co_filename.startswith(_CONTROL_FLOW):
            outermost = code.co_name
        frame = frame.f_back
    return outermost


def has_effect(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than compute its results and mark boundaries."""
    return any(effect is not _BOUNDARY_EFFECT for effect in eqn.effects)


# -- operators that are bound to parts of their operands


class CannotSplit(Exception):
    """An equation cannot be applied to shards of its operands; the text says why."""


def given_names(name: str, params: dict[str, Any]) -> tuple[str, ...]:
    """The user's name of a kernel (`pallas_call`), a target (`ffi_call`) or a callback."""
    if name == "pallas_call":
        given = params.get("name") or getattr(params.get("name_and_src_info"), "name", None)
    elif name == "ffi_call":
        given = params.get("target_name")
    elif name in ("pure_callback", "io_callback"):
        function: Any = getattr(params.get("callback"), "callback_func", None)
        while isinstance(function, functools.partial):
            function = function.func
        given = getattr(function, "__name__", None)
    else:
        given = None
    return (given,) if given else ()


def part_limits(
    name: str, params: dict[str, Any], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The most parts into which each dimension of operands and results can be cut: its elements, or
    the blocks of a `pallas_call`'s grid."""
    if name != "pallas_call":
        return list(shapes)
    _requirements.require(_requirements.PALLAS)
    grid_mapping = params["grid_mapping"]
    if len(grid_mapping.block_mappings) != len(shapes):
        raise CannotSplit("it has operands that are not cut into blocks")
    return [
        tuple(
            max(_steps(grid_mapping, mapping, dim, length), 1) for dim, length in enumerate(shape)
        )
        for mapping, shape in zip(grid_mapping.block_mappings, shapes, strict=True)
    ]


def params_on_parts(
    name: str,
    params: dict[str, Any],
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
) -> dict[str, Any]:
    """The parameters of an equation that is applied to shards of these shapes."""

    def resized(avals: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(a.update(shape=s) for a, s in zip(avals, results, strict=True))

    if name in ("pure_callback", "io_callback", "ffi_call"):
        return {**params, "result_avals": resized(params["result_avals"])}
    if name == "pallas_call":
        _requirements.require(_requirements.PALLAS)
        grid_mapping = _grid_on_parts(params, [*operands, *results])
        return {
            **params,
            "grid_mapping": grid_mapping,
            "out_avals": resized(params["out_avals"]),
        }
    return params


def _grid_axes(mapping: Any) -> list[int | None]:
    """For each dimension of a kernel's array, the grid axis that is the block's index."""
    jaxpr, _ = open_jaxpr(mapping.index_map_jaxpr)
    place = {var: axis for axis, var in enumerate(jaxpr.invars)}
    axes = [None if isinstance(v, Literal) else place.get(v) for v in jaxpr.outvars]
    ndim = mapping.array_aval.ndim
    return axes if len(axes) == ndim else [None] * ndim


def _steps(grid_mapping: Any, mapping: Any, dim: int, length: int) -> int:
    """The grid steps over a dimension's blocks, if there is one block per step; else 0."""
    axis, block = _grid_axes(mapping)[dim], mapping.block_shape[dim]
    kind = type(block).__name__
    size = block.block_size if kind == "Blocked" else 1 if kind == "Squeezed" else 0
    if axis is None or not isinstance(grid_mapping.grid[axis], int):
        return 0
    steps = grid_mapping.grid[axis]
    return steps if size * steps == length else 0


def _grid_on_parts(params: dict[str, Any], shapes: Sequence[tuple[int, ...]]) -> Any:
    """The grid of a kernel on shards of its arrays: fewer steps, each on blocks as before. Only for
    grid axes that are plain block indices in every array that they move."""
    given = params["grid_mapping"]
    if given.num_index_operands or len(given.block_mappings) != len(shapes):
        raise CannotSplit("it has operands that are not cut into blocks")
    grid = list(given.grid)
    cut_in = []  # for each array, the grid axes of its dimensions that are cut
    for mapping, shape in zip(given.block_mappings, shapes, strict=True):
        axes: set[int] = set()
        for dim, (before, after) in enumerate(zip(mapping.array_aval.shape, shape, strict=True)):
            if before == after:
                continue
            steps, axis = _steps(given, mapping, dim, before), _grid_axes(mapping)[dim]
            if not steps or axis is None or after * steps % before:
                raise CannotSplit("its blocks do not run over that dimension, one per step")
            grid[axis] = after * steps // before
            axes.add(axis)
        cut_in.append(axes)
    cut = set().union(*cut_in)
    for number, (mapping, axes) in enumerate(zip(given.block_mappings, cut_in, strict=True)):
        computed = _axes_computed_with(open_jaxpr(mapping.index_map_jaxpr)[0])
        if mapping.index_map_jaxpr.consts or cut & ({*_grid_axes(mapping), *computed} - axes):
            raise CannotSplit("the grid moves another block along with it")
        if cut & computed:
            raise CannotSplit("the index of a block is computed from it")
        if number >= given.num_inputs and cut - axes:
            raise CannotSplit("a result has one block for all steps along it")
    asked = [a for a in range(len(grid)) if a not in given.vmapped_dims]
    if cut & {asked[a] for a in _program_ids(params["jaxpr"])}:
        raise CannotSplit("the kernel asks for its place in the grid (program_id, num_programs)")
    mappings = tuple(
        replace(mapping, array_aval=mapping.array_aval.update(shape=tuple(shape)))
        for mapping, shape in zip(given.block_mappings, shapes, strict=True)
    )
    return replace(given, grid=tuple(grid), block_mappings=mappings)


def _axes_computed_with(jaxpr: _core.Jaxpr) -> set[int]:
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
    return {axis for axis, var in enumerate(jaxpr.invars) if var in read}


def _program_ids(jaxpr: _core.Jaxpr) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield eqn.params["axis"]
        for inner in _core.jaxprs_in_params(eqn.params):
            yield from _program_ids(inner)


# -- arrays from mesh to mesh


def shard_copier(targets: Sequence[Any]) -> Any:
    """A function that copies arrays to target shardings with the same shards, one by one. It is the
    call at the bottom of `jax.device_put`, without its checks."""
    device_lists = [target._internal_device_list for target in targets]
    semantics = [_xla_client.ArrayCopySemantics.ALWAYS_COPY] * len(targets)
    copy = _xla_client.batched_copy_array_to_devices_with_sharding
    return lambda arrays: copy(arrays, device_lists, targets, semantics)


def shards_of(array: jax.Array) -> list[jax.Array]:
    """An array's shards in this process, in the order of `devices_of`: `addressable_shards` without
    their descriptions, which take longer to make."""
    shards: Any = array
    return shards._arrays


def devices_of(sharding: jax.sharding.NamedSharding) -> list[Any]:
    """The devices of this process, in the order in which arrays of this sharding hold shards."""
    return list(sharding._internal_device_list.addressable_device_list)


class ArrayMaker:
    """Makes arrays of one type of their shards, in the order of `devices_of`. JAX checks the first;
    the others are not checked, which would take longer than all else."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.NamedSharding
    ) -> None:
        self._type = (shape, sharding, dtype)
        self._aval: ShapedArray | None = None

    def __call__(self, shards: Sequence[jax.Array]) -> jax.Array:
        shape, sharding, dtype = self._type
        arrays: list[Any] = list(shards)
        if self._aval is not None:
            return _array.ArrayImpl(self._aval, sharding, arrays, committed=True, _skip_checks=True)
        made: Any = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
        self._aval = made.aval
        return made


def start_transfer_server(*args: Any, **options: Any) -> Any:
    """A server of `jax.experimental.transfer`, through which processes pull each other's arrays."""
    _requirements.require(_requirements.TRANSFERS)
    from jax.experimental import transfer

    return transfer.start_transfer_server(*args, **options)


def lowered(jitted: Any, *arguments: Any) -> jax.stages.Lowered:
    """`jitted.lower(…)` of a function that keeps its unused arguments, without a leak: JAX 0.12
    remembers that nothing is to be pruned under the program itself, which thus lives for ever, and
    with it everything that JAX remembers of it, executables too."""
    traced = jitted.trace(*arguments)
    result = traced.lower()
    forget_pruned(traced.jaxpr)
    return result


def forget_pruned(jaxpr: Any) -> None:
    """Makes JAX forget which arguments of a program it keeps (see `lowered`)."""
    _pxla._dce_jaxpr.evict_weakref(jaxpr)


def reset_compilation_cache() -> None:
    """Makes JAX look up the location of its compilation cache again."""
    _requirements.require(_requirements.CACHE)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def key_implementation(key_dtype: Any) -> str:
    """The name of a key's implementation, for `jax.random.wrap_key_data`."""
    return key_dtype._impl.name


def with_weak_type(array: jax.Array) -> jax.Array:
    """The same values with a weak type, as Python numbers have."""
    from jax._src.lax.lax import _convert_element_type

    weak: Any = _convert_element_type(array, array.dtype, weak_type=True)
    return weak


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer."""
    return isinstance(value, _core.Tracer)


# -- groups of processes


def coordinator_address() -> str:
    """Where the coordination service of `jax.distributed` listens, as 'host:port'."""
    _store()  # raises if there is none
    from jax._src import distributed

    return str(distributed.global_state.coordinator_address)


def store_set(key: str, value: bytes) -> None:
    """Store a value for all processes of `jax.distributed`."""
    _store().key_value_set_bytes(key, value)


def store_put(key: str, value: bytes) -> None:
    """Store a value for all processes in place of the one that there may be."""
    try:
        _store().key_value_set_bytes(key, value, allow_overwrite=True)
    except jax.errors.JaxRuntimeError as error:
        raise ClusterError(
            f"The coordination service of jax.distributed was lost: {error}"
        ) from error


def store_get(key: str, limit_s: float) -> bytes | None:
    """Waits for a value that some process stores; None if it does not come in time."""
    try:
        return _store().blocking_key_value_get_bytes(key, max(1, round(1000 * limit_s)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise ClusterError(
            f"The coordination service of jax.distributed was lost: {error}. The process that "
            "runs it (process 0) may have ended."
        ) from error


def store_get_now(key: str) -> bytes | None:
    """A value that some process has stored; None if there is none."""
    try:
        return _store().key_value_try_get_bytes(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise ClusterError(
            f"The coordination service of jax.distributed was lost: {error}"
        ) from error


def store_set_new(key: str, value: bytes) -> bool:
    """Store a value for all processes, unless there is one: then False."""
    try:
        _store().key_value_set_bytes(key, value)
        return True
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise ClusterError(
            f"The coordination service of jax.distributed was lost: {error}"
        ) from error


def store_delete(key: str) -> None:
    _store().key_value_delete(key)


def _store() -> Any:
    _requirements.require(_requirements.DISTRIBUTED)
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise ClusterError(
            "There are several JAX processes but no coordination service, which they need to agree "
            "on a plan. Call jax.distributed.initialize() first, in every process."
        )
    return client
