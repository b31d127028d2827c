"""Everything that decides a plan, as one digest: a traced step and what it is planned for → key.

    program    every equation with its parameters, types, weak types, constants and scope
    call       names of inputs and outputs; which are state, batch or donated
    source     lines of equations, which plans show; code of the functions that made them, since
               micro-batches are traced while planning
    request    cluster with the content of its profile, method with all options, mesh
    rules      that the user registered
    planner    autopar's own files (cost tables are among them), JAX, jaxlib, HiGHS, settings of JAX

What has no canonical form (a parameter that is an object of an unknown type) makes a step that is
planned every time. So does a method that follows another step's plan, and one that times plans.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import _jax
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.ir.profile import MachineProfile
from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.methods import (
    AnyMethod,
    CreateStateParallel,
    FollowParallel,
    ManualParallel,
    options_of,
)
from autopar.plan_cache.canonical import canonical, code_digest
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.trace import StepOptions
from autopar.tracer.user_rules import registered_rules

VERSION = 1  # of keys: another one makes all old entries unreachable

# Settings of JAX that may change how a program is traced, lowered or split.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_use_shardy_partitioner",
)
_PACKAGES = ("jax", "jaxlib", "highspy", "pulp", "numpy", "autopar")
# The rooms whose code and tables decide plans; what runs and shows them does not.
_PLANNER = (
    *("_jax.py", "compiler.py", "methods.py", "errors.py"),
    *("ir", "tracer", "rewrite", "cost", "lower", "sharding", "stages", "plan_cache"),
)
_PLAIN = frozenset((type(None), bool, int, float, str))


def is_cacheable(method: AnyMethod | ParallelPlan | None) -> bool:
    """Whether plans of a method depend on nothing but what a key holds. A plan that follows another
    step's depends on that; timed plans depend on the machine, and have a database of their own."""
    if isinstance(method, (ParallelPlan, CreateStateParallel, FollowParallel)):
        return False
    return not options_of(method).rerank


def plan_key(
    step: TracedStep,
    options: StepOptions,
    cluster: ClusterSpec,
    method: AnyMethod | None,
    mesh: LogicalMesh | None,
    one_mesh: bool,
) -> str:
    """The key of a plan; `NotCanonicalError` if something that decides has no canonical form."""
    digest = hashlib.sha256(f"autopar plan {VERSION}".encode())
    for part in (
        program_digest(step.program),
        *_sources(step),
        _call_form(step),
        repr(options),
        _cluster_form(cluster),
        _method_form(method),
        _method_form(mesh),
        one_mesh,
        canonical(registered_rules()),
        planner_versions(),
        [(name, str(getattr(jax.config, name, None))) for name in _SETTINGS],
    ):
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()


# -- the program


def program_digest(program: Program) -> str:
    """Of all that the passes read of a program. `program_fingerprint` has the equations; here is
    what it leaves out."""
    digest = hashlib.sha256(program_fingerprint(program).encode())
    texts: dict[str, int] = {}
    contexts: dict[int, str] = {}  # of many equations each
    rows: list[Any] = []
    for equation in program.all_equations():
        rows.append(texts.setdefault(equation.scope, len(texts)))
        context = contexts.get(id(equation.context))
        if context is None:
            context = repr(_jax.context_settings(equation.context))
            contexts[id(equation.context)] = context
        rows.append(texts.setdefault(context, len(texts)))
        if equation.has_effect or equation.marks or equation.inner_marks:
            rows.append((equation.has_effect, equation.marks, equation.inner_marks))
        if not all([type(operand) is int for operand in equation.operands]):
            rows += _constants(equation.operands)
        for name, value in equation.params.items():
            if type(value) not in _PLAIN and _is_opaque(equation, value):
                rows.append((name, canonical(value)))
    for part in _with_bodies(program):
        rows += _constants(part.outputs)
        rows += [(v, canonical(c)) for v, c in part.captured]
    digest.update(repr(rows).encode())
    digest.update("\n".join(texts).encode())
    digest.update(bytes([bool(getattr(aval, "weak_type", False)) for aval in program.avals]))
    return digest.hexdigest()


def _constants(operands: tuple[Operand, ...]) -> list[Any]:
    return [
        (position, canonical(operand.value), _type_form(operand.aval))
        for position, operand in enumerate(operands)
        if type(operand) is Constant
    ]


def _type_form(aval: Any) -> Any:
    return canonical(aval.dtype), aval.shape, bool(getattr(aval, "weak_type", False))


def _is_opaque(equation: Equation, value: Any) -> bool:
    """Whether a fingerprint knows a parameter's type alone. Bodies are programs of their own."""
    return not _is_plain(value) and not (equation.bodies and _holds_jaxpr(value))


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _holds_jaxpr(value: Any) -> bool:
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return hasattr(_jax.open_jaxpr(first)[0], "eqns")


def _with_bodies(program: Program) -> Iterator[Program]:
    yield program
    for equation in program.equations:
        for body in equation.bodies:
            yield from _with_bodies(body)


# -- the call and the code


def _call_form(step: TracedStep) -> Any:
    call = step.call
    inputs = [(str(aval), bool(getattr(aval, "weak_type", False))) for aval in step.avals]
    return (
        *(step.name, call.paths, call.argument, [keystr(path) for path in call.key_paths]),
        *(sorted(call.in_objects), inputs, step.out_paths, step.state, step.batch, step.donated),
        *(step.num_micro_batches, step.notes),
    )


def _sources(step: TracedStep) -> tuple[str, list[str]]:
    """(digest of every equation's line, which plans show; digests of the functions that made the
    program). Micro-batches are traced while planning, and a function may treat them otherwise than
    the whole batch."""
    numbers: dict[tuple[Any, ...], int] = {}
    column: list[int] = []
    for equation in step.program.all_equations():
        tracebacks = (equation.source_info.traceback, *[c.traceback for c in equation.callers])
        column.append(numbers.setdefault(tracebacks, len(numbers)))
    lines = [_jax.line_of_user(tracebacks) for tracebacks in numbers]
    places = {line: number for number, line in enumerate(dict.fromkeys(lines))}
    text = repr(([places[lines[number]] for number in column], list(places)))
    code = _jax.code_behind((t for ts in numbers for t in ts), step.flat_fn.__code__)
    return hashlib.sha256(text.encode()).hexdigest(), sorted(map(code_digest, code))


# -- the request


def _cluster_form(cluster: ClusterSpec) -> Any:
    names = [field.name for field in fields(cluster) if field.name != "profile"]
    form = [(name, canonical(getattr(cluster, name))) for name in names]
    return (*form, _profile_form(cluster.profile))


def _profile_form(profile: Any) -> Any:
    """A profile by its content, whichever path it was read from; plans show its name."""
    if isinstance(profile, MachineProfile):
        return ("samples", profile.digest, profile.name)
    return canonical(profile)


def _method_form(method: Any) -> Any:
    """Every field of a method or mesh, options and all, with the content of profiles."""
    if not is_dataclass(method):
        return canonical(method)
    form: list[Any] = [type(method).__qualname__]
    for field in fields(method):
        value = getattr(method, field.name)
        if field.name == "profile":
            form.append(_profile_form(value))
        elif isinstance(method, ManualParallel) and field.name in ("in_specs", "out_specs"):
            form.append(_specs_form(value))
        else:
            form.append(_method_form(value))
    return tuple(form)


def _specs_form(specs: Any) -> Any:
    """Pytrees of specs by paths: the pytrees may be of the user's own types."""

    def is_leaf(value: Any) -> bool:
        return value is None or isinstance(value, PartitionSpec)

    leaves, _ = tree_flatten_with_path(specs, is_leaf=is_leaf)
    return [(keystr(path), canonical(leaf)) for path, leaf in leaves]


# -- the planner


@functools.cache
def planner_versions() -> tuple[Any, ...]:
    """Versions of the packages that plan, and the planner's digest."""
    return (*((name, _version(name)) for name in _PACKAGES), planner_digest())


@functools.cache
def planner_digest() -> str:
    """Of the planner's own files: a working copy changes without its version."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for name in _PLANNER:
        files = sorted((root / name).rglob("*")) if (root / name).is_dir() else [root / name]
        for file in files:
            if file.suffix in (".py", ".json") and file.is_file():
                digest.update(file.relative_to(root).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
