"""From the installed packages to an error that names what is missing and what to install.

Any release of JAX may drop an internal. `INTERNALS` lists all that autopar uses, so that autopar
refuses a release without one of them by name before it plans anything, and `autopar doctor` can
list them. `_jax.py` is the only file that uses them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from autopar.errors import DependencyError, UntestedJaxWarning

# The oldest and the newest JAX that all tests pass on. A test keeps `pyproject.toml` and the
# documentation consistent with them.
OLDEST_JAX = "0.10.2"
NEWEST_JAX = "0.12.0.1"

_MAJOR, _MINOR = map(int, NEWEST_JAX.split(".")[:2])
TESTED_RANGE = f"{OLDEST_JAX} to {_MAJOR}.{_MINOR}"
JAX_BOUNDS = f">={OLDEST_JAX},<{_MAJOR}.{_MINOR + 1}"

# Required packages, as arguments of pip.
REQUIRED = {
    "jax": f"jax{JAX_BOUNDS}",
    "numpy": "numpy",
    "scipy": "scipy",
    "pulp": "pulp>=3.3.1",
    "highspy": "highspy>=1.11",
}
OLDEST_RAY = "2.40"

STEPS = "planning and running steps"
PALLAS = "sharding Pallas kernels"
DISTRIBUTED = "several JAX processes"
TRANSFERS = "transfers between workers"
VERIFY = "autopar.verify"
CACHE = "autopar profile --model"

# Internals by use: dotted paths of modules, their members and fields of classes, with a keyword
# argument in brackets. `STEPS` are looked up when autopar is first used, the others on their use.
INTERNALS: dict[str, tuple[str, ...]] = {
    STEPS: (
        "jax._src.array.ArrayImpl._arrays",
        "jax._src.core.Jaxpr.constvars",
        "jax._src.core.Jaxpr.eqns",
        "jax._src.core.Jaxpr.invars",
        "jax._src.core.Jaxpr.outvars",
        "jax._src.core.JaxprEqn.ctx",
        "jax._src.core.JaxprEqn.effects",
        "jax._src.core.JaxprEqn.invars",
        "jax._src.core.JaxprEqn.outvars",
        "jax._src.core.JaxprEqn.params",
        "jax._src.core.JaxprEqn.primitive",
        "jax._src.core.JaxprEqn.source_info",
        "jax._src.core.JaxprEqnContext.compute_type",
        "jax._src.core.JaxprEqnContext.manager",
        "jax._src.core.JaxprEqnContext.threefry_partitionable",
        "jax._src.core.JaxprEqnContext.xla_metadata",
        "jax._src.core.Literal",
        "jax._src.core.ShapedArray",
        "jax._src.core.Tracer",
        "jax._src.core.jaxprs_in_params",
        "jax._src.core.trace_state_clean",
        "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability",
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version",
        "jax._src.cudnn.fused_attention_stablehlo.cuda_versions",
        "jax._src.dispatch.prim_requires_devices_during_lowering",
        "jax._src.effects.Effect",
        "jax._src.effects.control_flow_allowed_effects",
        "jax._src.effects.custom_derivatives_allowed_effects",
        "jax._src.effects.lowerable_effects",
        "jax._src.effects.remat_allowed_effects",
        "jax._src.interpreters.pxla._dce_jaxpr.evict_weakref",
        "jax._src.lax.control_flow.loops.scan_p",
        "jax._src.lax.lax._convert_element_type(weak_type)",
        "jax._src.lax.lax.optimization_barrier_p",
        "jax._src.lib.cuda_versions",
        "jax._src.lib.mlir.ir.Block",
        "jax._src.lib.mlir.passmanager.PassManager.parse",
        "jax._src.lib.version_str",
        "jax._src.lib.xla_client.ArrayCopySemantics.ALWAYS_COPY",
        "jax._src.lib.xla_client.Traceback.raw_frames",
        "jax._src.lib.xla_client.batched_copy_array_to_devices_with_sharding",
        "jax._src.source_info_util.Frame.file_name",
        "jax._src.source_info_util.Frame.function_name",
        "jax._src.source_info_util.Frame.start_line",
        "jax._src.source_info_util.NameStack.extend",
        "jax._src.source_info_util.NameStack.stack",
        "jax._src.source_info_util.Scope.name",
        "jax._src.source_info_util.SourceInfo.name_stack",
        "jax._src.source_info_util.SourceInfo.traceback",
        "jax._src.source_info_util.current_name_stack",
        "jax._src.source_info_util.register_exclusion",
        "jax._src.source_info_util.summarize",
        "jax._src.source_info_util.user_context(name_stack)",
        "jax._src.source_info_util.user_frames",
        "jax._src.state.types.AbstractRef",
        "jax._src.xla_bridge.backends_are_initialized",
        "jax._src.xla_bridge.get_backend",
        "jax.experimental.layout.Layout",
        "jax.experimental.layout.with_layout_constraint",
        "jax.extend.core.Primitive.bind",
        "jax.extend.core.Primitive.def_abstract_eval",
        "jax.extend.core.Primitive.def_effectful_abstract_eval",
        "jax.extend.core.Primitive.def_impl",
        "jax.extend.core.Primitive.get_bind_params",
        "jax.extend.core.Primitive.impl",
        "jax.extend.core.Primitive.multiple_results",
        "jax.extend.random.threefry2x32_p",
        "jax.interpreters.ad.primitive_jvps",
        "jax.interpreters.ad.primitive_transposes",
        "jax.interpreters.batching.primitive_batchers",
        "jax.interpreters.mlir.register_lowering",
        "jax.sharding.NamedSharding._internal_device_list",
    ),
    PALLAS: (
        "jax._src.pallas.core.BlockMapping.array_aval",
        "jax._src.pallas.core.BlockMapping.block_shape",
        "jax._src.pallas.core.BlockMapping.index_map_jaxpr",
        "jax._src.pallas.core.GridMapping.block_mappings",
        "jax._src.pallas.core.GridMapping.grid",
        "jax._src.pallas.core.GridMapping.num_index_operands",
        "jax._src.pallas.core.GridMapping.num_inputs",
        "jax._src.pallas.core.GridMapping.vmapped_dims",
    ),
    DISTRIBUTED: (
        "jax._src.distributed.global_state.client",
        "jax._src.distributed.global_state.coordinator_address",
    ),
    TRANSFERS: ("jax.experimental.transfer.start_transfer_server",),
    VERIFY: ("jax.experimental.topologies.get_topology_desc",),
    CACHE: ("jax.experimental.compilation_cache.compilation_cache.reset_cache",),
}


@dataclass(frozen=True)
class InternalState:
    """path:  of an internal of JAX.
    use:   what autopar needs it for.
    fault: why it cannot be used; empty if it can.
    """

    path: str
    use: str
    fault: str


def internal_states(*uses: str) -> Iterator[InternalState]:
    """The internals that these uses need; all internals if no use is given."""
    for use in uses or INTERNALS:
        for path in INTERNALS[use]:
            yield InternalState(path, use, _fault(path))


def check_jax() -> None:
    """Warns if autopar is not tested with the installed JAX; raises if that lacks an internal that
    every step needs. `_jax.py` calls this once, when it is imported."""
    jax = importlib.import_module("jax")
    if not is_tested(jax.__version__):
        warnings.warn(UntestedJaxWarning(untested_text(jax.__version__)), stacklevel=2)
    require(STEPS)


@cache
def require(use: str) -> None:
    """Raises a `DependencyError` if JAX lacks an internal that this use needs."""
    for state in internal_states(use):
        if state.fault:
            raise lacking(state.path, use)


def lacking(what: str, use: str = STEPS) -> DependencyError:
    """The error for an internal that the installed JAX lacks."""
    version = importlib.import_module("jax").__version__
    if is_tested(version):
        advice = f"'jax=={OLDEST_JAX}' or 'jax=={NEWEST_JAX}', and report it with the output of"
        advice += " `autopar doctor`."
    else:
        advice = f"'{REQUIRED['jax']}'. `autopar doctor` checks everything that autopar needs."
    return DependencyError(
        f"JAX {version} has no {what}, which autopar needs for {use}. autopar is tested with JAX "
        f"{TESTED_RANGE}: pip install {advice}"
    )


def is_tested(version: str) -> bool:
    """Whether a version of JAX is within the tested range; pre-releases count as the release."""
    release = _release(version)
    return _release(OLDEST_JAX) <= release and release[:2] <= (_MAJOR, _MINOR)


def untested_text(version: str) -> str:
    age = "older" if _release(version) < _release(OLDEST_JAX) else "newer"
    return (
        f"JAX {version} is {age} than what autopar is tested with (JAX {TESTED_RANGE}). If "
        f"something fails: pip install '{REQUIRED['jax']}'."
    )


def is_older(version: str, oldest: str) -> bool:
    return _release(version) < _release(oldest)


def raise_if_missing(error: ImportError) -> None:
    """Raises a `DependencyError` if the import failed for one of autopar's required packages, not
    for one of the user's."""
    named = (error.name or "").partition(".")[0]
    absent = (package for package in REQUIRED if importlib.util.find_spec(package) is None)
    package = named if named in REQUIRED else next(absent, None)
    if package is not None:
        raise _missing(package, error) from error


def require_packages(*packages: str) -> None:
    """Raises a `DependencyError` for a package that is imported only later, since that is slow."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _missing(package, "it is not installed")


def _missing(package: str, why: object) -> DependencyError:
    return DependencyError(
        f"{package}, which autopar needs, cannot be imported ({why}). Install it: "
        f"pip install '{REQUIRED[package]}'. `autopar doctor` checks the whole installation."
    )


def _release(version: str) -> tuple[int, ...]:
    """(0, 12, 0) of "0.12.0.dev3+cpu"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _fault(path: str) -> str:
    name, _, argument = path.rstrip(")").partition("(")
    try:
        target = _look_up(name)
    except Exception as error:  # importing a part of JAX may raise anything
        return f"{type(error).__name__}: {error}"
    if argument and argument not in inspect.signature(target).parameters:
        return f"it takes no argument {argument!r}"
    return ""


def _look_up(path: str) -> Any:
    names = path.split(".")
    target: Any = importlib.import_module(names[0])
    for end, part in enumerate(names[1:], 2):
        if inspect.ismodule(target) and not hasattr(target, part):
            target = importlib.import_module(".".join(names[:end]))
        elif part in getattr(target, "__dataclass_fields__", ()):
            target = target.__dataclass_fields__[part]
        else:
            target = getattr(target, part)
    return target
