"""`autopar.verify`: a plan proved by compiling it, from a step and its plan to a `VerifyReport`.

Every program of the plan is lowered for GPUs that need not exist, and XLA's GPU compiler compiles
it in a process of its own. The report puts XLA's memory, collectives and FLOPs next to the plan's
predictions. Stage programs with the same text are compiled once.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

from autopar.compiler import plan_step
from autopar.errors import ArgumentError, CompileError
from autopar.ir.devices import DEVICES
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.remote import LoweredProgram, LoweredStep, ProgramSpec
from autopar.ir.xla_options import StoredOptions
from autopar.lower.lower_step import AbstractDevices
from autopar.lower.remote_step import lower_for_workers
from autopar.measure.verify.compare import verified_meshes, verified_programs
from autopar.measure.verify.compile import compile_all
from autopar.measure.verify.jobs import CompileJob
from autopar.measure.verify.report import VerifyReport
from autopar.measure.verify.targets import GpuTarget, cuda_version, load_target, target_of
from autopar.progress import Progress
from autopar.runtime.remote.exporting import CallsBackError, exported_stage_program
from autopar.sharding.memory_budget import RESERVE_SHARE
from autopar.tracer.trace import DEFAULT_BATCH, step_and_options

_LOCATION_LINE = re.compile(r"^#loc.*\n", re.MULTILINE)
_LOCATION = re.compile(r' loc\((?:[^()"]|"[^"]*")*\)')


def verify(
    fn: Callable[..., Any],
    *args: Any,
    plan: ParallelPlan,
    target: str | Path | None = None,
    time_limit_s: float = 3600.0,
    hlo_folder: str | Path | None = None,
    static_argnums: int | Sequence[int] = (),
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    **kwargs: Any,
) -> VerifyReport:
    """Compile every program of a plan for its GPU, without having one, and compare XLA's memory,
    collectives and FLOPs with the predicted ones. `report.fits` says whether the plan fits. Needs
    JAX's CUDA plugin: `pip install 'autopar[verify]'`.

    fn:           the step; `args` and `kwargs` are its arguments, arrays or
                  `jax.ShapeDtypeStruct`s.
    plan:         the plan to verify.
    target:       the GPU: a name such as "h100-80gb", or the path of a description. Default: the
                  plan's device.
    time_limit_s: for compiling one program.
    hlo_folder:   where to write XLA's optimized HLO, a file per program.
    static_argnums, batch_argnums: as for `parallelize`.

    Returns a `VerifyReport`. Raises `CompileError` if XLA rejects a program or takes too long, and
    `PlanError` if the plan was made for another program.
    """
    started = time.perf_counter()
    if not isinstance(plan, ParallelPlan):
        raise ArgumentError(
            f"verify(plan={plan!r}): needs a ParallelPlan; make one with autopar.plan(…) or read "
            "one with autopar.ParallelPlan.load(path)."
        )
    if not isinstance(time_limit_s, (int, float)) or not time_limit_s > 0:
        raise ArgumentError(f"verify(time_limit_s={time_limit_s!r}): needs seconds > 0.")
    gpu = target_of(*_device(plan)) if target is None else load_target(target)
    cuda = cuda_version(gpu)
    step, options = step_and_options("verify", fn, static_argnums, batch_argnums)
    cluster = plan.cluster or ClusterSpec(1, plan.num_devices, DEVICES.get(plan.device, "cpu"))
    planned = plan_step(step, args, kwargs, cluster=cluster, method=plan, options=options)
    lowered = lower_for_workers(planned, AbstractDevices(plan.num_devices, "gpu"))
    folder = None if hlo_folder is None else Path(hlo_folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    jobs, job_of_stage_program = _jobs(lowered, cluster, gpu, folder, plan.xla_options or ())
    with Progress(f"compiling for {gpu.name}", len(jobs)) as progress:
        costs = compile_all(jobs, time_limit_s, lambda _: progress.step())
    limit = _limit_bytes(plan, gpu, given=target is not None)
    return VerifyReport(
        name=plan.name,
        target=gpu.name,
        device=gpu.description,
        versions=(*_versions(), ("CUDA", str(cuda))),
        is_pipeline=plan.is_pipeline,
        num_micro_batches=plan.num_micro_batches,
        programs=verified_programs(lowered, jobs, job_of_stage_program, costs),
        meshes=verified_meshes(plan, lowered, jobs, job_of_stage_program, costs, limit),
        seconds=time.perf_counter() - started,
    )


def check_compiler(cluster: ClusterSpec, target: str | Path | None = None) -> None:
    """Raise if plans for this cluster cannot be verified here, before minutes of planning."""
    device = cluster.spec
    cuda_version(
        target_of(device.name, device.memory_bytes) if target is None else load_target(target)
    )


def _device(plan: ParallelPlan) -> tuple[str, float | None]:
    """Name and memory of a plan's device."""
    if plan.cluster is not None:
        return plan.cluster.spec.name, plan.cluster.spec.memory_bytes
    preset = DEVICES.get(plan.device)
    return plan.device, preset.memory_bytes if preset else None


def _limit_bytes(plan: ParallelPlan, target: GpuTarget, given: bool) -> float:
    """The memory that a step may use: the device's less a reserve, or the plan's budget if that is
    larger and the target is the plan's device."""
    _, memory = _device(plan)
    if given or memory is None:
        return (1 - RESERVE_SHARE) * target.memory_bytes
    limit, budget = (1 - RESERVE_SHARE) * memory, plan.memory_budget_bytes
    return max(limit, min(budget, memory)) if isfinite(budget) else limit


def _versions() -> list[tuple[str, str]]:
    versions = []
    for package in ("jax", "jaxlib"):
        try:
            versions.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return versions


def _jobs(
    lowered: LoweredStep,
    cluster: ClusterSpec,
    target: GpuTarget,
    hlo_folder: Path | None,
    xla_options: StoredOptions,
) -> tuple[list[CompileJob], list[int]]:
    """The distinct programs to compile, and the number of each stage program's among them."""
    jobs: list[CompileJob] = []
    known: dict[str, int] = {}
    job_of_stage_program = []
    for stage_program, mesh in zip(lowered.stage_programs, lowered.stage_program_mesh, strict=True):
        topology = _topology(lowered.meshes[mesh], cluster)
        with Progress(f"lowering {stage_program.name}"):
            exported = _exported(lowered.name, stage_program)
        key = _digest(exported.mlir_module(), stage_program, topology)
        if key not in known:
            known[key] = len(jobs)
            name = f"{lowered.name}_{stage_program.name}"
            spec = ProgramSpec(
                stage_program.name,
                stage_program.stage,
                stage_program.reads,
                stage_program.writes,
                stage_program.donated,
                xla_options,
            )
            hlo = str((hlo_folder / f"{name}.hlo.txt").absolute()) if hlo_folder else ""
            program = _serialized(exported)
            jobs.append(CompileJob(name, spec, program, topology, target.config, hlo, cluster.spec))
        job_of_stage_program.append(known[key])
    return jobs, job_of_stage_program


def _exported(step_name: str, stage_program: LoweredProgram) -> Any:
    """The exported program; one function name for all, so that equal programs have equal text."""
    try:
        return exported_stage_program(step_name, stage_program, "gpu", function_name="piece")
    except CallsBackError as error:
        raise CompileError(
            f"verify: {error} Such programs cannot be compiled in another process; verify the step "
            "without it."
        ) from error


def _serialized(exported: Any) -> bytes:
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise CompileError(
            "verify: the package flatbuffers is missing, which serializes programs for the "
            "compiler. Install it with: pip install 'autopar[verify]'."
        ) from error


def _digest(text: str, stage_program: LoweredProgram, topology: tuple[int, int]) -> str:
    """Equal for programs that differ only in source locations."""
    text = _LOCATION.sub("", _LOCATION_LINE.sub("", text))
    places = repr((stage_program.reads, stage_program.writes, stage_program.donated, topology))
    return hashlib.sha256((text + places).encode()).hexdigest()


def _topology(devices: Sequence[int], cluster: ClusterSpec) -> tuple[int, int]:
    """(hosts, devices per host) of some of a cluster's devices, by number."""
    hosts = Counter(device // cluster.devices_per_host for device in devices)
    if len(set(hosts.values())) != 1:
        return 1, len(devices)
    return len(hosts), next(iter(hosts.values()))
