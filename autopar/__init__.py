"""autopar: a single-device JAX train step, run well on many devices, by itself.

Nothing is imported before it is used: `import autopar` costs milliseconds, and the first use of a
name the rest. Type checkers read the imports below, `__getattr__` the table `_HOMES`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar.ir import views as _views

if TYPE_CHECKING:
    from autopar.api import (
        ParallelFunction,
        ShardingSolution,
        compile,
        constrain,
        get_last_dp_result,
        mark_layer_boundary,
        parallelize,
        plan,
        solve_sharding,
    )
    from autopar.compiler import register_rule
    from autopar.errors import (
        ArgumentError,
        AutoparError,
        CheckpointError,
        ClusterError,
        CompileError,
        DataError,
        DependencyError,
        MemoryBudgetError,
        MeshError,
        PlanError,
        ProfileError,
        SolverError,
        SpecError,
        TraceError,
        TraceFileError,
        UntestedJaxWarning,
        WorkerError,
    )
    from autopar.inspect.diff import diff
    from autopar.inspect.record import Trace, read_trace, trace
    from autopar.ir.mesh import ClusterSpec, DeviceSpec, LogicalMesh
    from autopar.ir.plan import ParallelPlan
    from autopar.ir.profile import MachineProfile, load_profile
    from autopar.measure.profile import profile_machine
    from autopar.measure.verify.plan_verified import plan_verified
    from autopar.measure.verify.report import VerifyReport
    from autopar.measure.verify.verify_plan import verify
    from autopar.methods import (
        AutoLayers,
        AutoParallel,
        AutoStages,
        CreateStateParallel,
        DataParallel,
        FollowParallel,
        ManualLayers,
        ManualParallel,
        ManualStages,
        PipeshardParallel,
        ShardingOptions,
        ShardParallel,
        UniformStages,
        Zero2Parallel,
        Zero3Parallel,
    )
    from autopar.runtime.checkpoints import (
        CheckpointSave,
        checkpoint_steps,
        latest_step,
        save_checkpoint,
    )
    from autopar.runtime.remote.arrays import DistributedArray
    from autopar.session import init, shutdown
    from autopar.training.data_loader import DataLoader, data_loader
    from autopar.training.elastic import run_training
    from autopar.training.restore import restore_checkpoint

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AutoLayers",
    "AutoParallel",
    "AutoStages",
    "AutoparError",
    "CheckpointError",
    "CheckpointSave",
    "ClusterError",
    "ClusterSpec",
    "CompileError",
    "CreateStateParallel",
    "DataError",
    "DataLoader",
    "DataParallel",
    "DependencyError",
    "DeviceSpec",
    "DistributedArray",
    "FollowParallel",
    "LogicalMesh",
    "MachineProfile",
    "ManualLayers",
    "ManualParallel",
    "ManualStages",
    "MemoryBudgetError",
    "MeshError",
    "ParallelFunction",
    "ParallelPlan",
    "PipeshardParallel",
    "PlanError",
    "ProfileError",
    "ShardParallel",
    "ShardingOptions",
    "ShardingSolution",
    "SolverError",
    "SpecError",
    "Trace",
    "TraceError",
    "TraceFileError",
    "UniformStages",
    "UntestedJaxWarning",
    "VerifyReport",
    "WorkerError",
    "Zero2Parallel",
    "Zero3Parallel",
    "checkpoint_steps",
    "compile",
    "constrain",
    "data_loader",
    "diff",
    "get_last_dp_result",
    "init",
    "latest_step",
    "load_profile",
    "mark_layer_boundary",
    "parallelize",
    "plan",
    "plan_verified",
    "profile_machine",
    "read_trace",
    "register_rule",
    "restore_checkpoint",
    "run_training",
    "save_checkpoint",
    "shutdown",
    "solve_sharding",
    "trace",
    "verify",
]

_HOMES = {
    "ParallelFunction": "autopar.api",
    "ShardingSolution": "autopar.api",
    "compile": "autopar.api",
    "constrain": "autopar.api",
    "get_last_dp_result": "autopar.api",
    "mark_layer_boundary": "autopar.api",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "solve_sharding": "autopar.api",
    "CheckpointSave": "autopar.runtime.checkpoints",
    "checkpoint_steps": "autopar.runtime.checkpoints",
    "latest_step": "autopar.runtime.checkpoints",
    "save_checkpoint": "autopar.runtime.checkpoints",
    "register_rule": "autopar.compiler",
    "ArgumentError": "autopar.errors",
    "AutoparError": "autopar.errors",
    "CheckpointError": "autopar.errors",
    "ClusterError": "autopar.errors",
    "CompileError": "autopar.errors",
    "DataError": "autopar.errors",
    "DependencyError": "autopar.errors",
    "MemoryBudgetError": "autopar.errors",
    "MeshError": "autopar.errors",
    "PlanError": "autopar.errors",
    "ProfileError": "autopar.errors",
    "SolverError": "autopar.errors",
    "SpecError": "autopar.errors",
    "TraceError": "autopar.errors",
    "TraceFileError": "autopar.errors",
    "UntestedJaxWarning": "autopar.errors",
    "WorkerError": "autopar.errors",
    "diff": "autopar.inspect.diff",
    "ClusterSpec": "autopar.ir.mesh",
    "DeviceSpec": "autopar.ir.mesh",
    "LogicalMesh": "autopar.ir.mesh",
    "ParallelPlan": "autopar.ir.plan",
    "MachineProfile": "autopar.ir.profile",
    "load_profile": "autopar.ir.profile",
    "DataLoader": "autopar.training.elastic.data_loader",
    "data_loader": "autopar.training.elastic.data_loader",
    "AutoLayers": "autopar.methods",
    "AutoParallel": "autopar.methods",
    "AutoStages": "autopar.methods",
    "CreateStateParallel": "autopar.methods",
    "DataParallel": "autopar.methods",
    "FollowParallel": "autopar.methods",
    "ManualLayers": "autopar.methods",
    "ManualParallel": "autopar.methods",
    "ManualStages": "autopar.methods",
    "PipeshardParallel": "autopar.methods",
    "ShardParallel": "autopar.methods",
    "ShardingOptions": "autopar.methods",
    "UniformStages": "autopar.methods",
    "Zero2Parallel": "autopar.methods",
    "Zero3Parallel": "autopar.methods",
    "profile_machine": "autopar.measure.profile",
    "VerifyReport": "autopar.measure.verify.report",
    "plan_verified": "autopar.measure.verify.plan_verified",
    "restore_checkpoint": "autopar.training.elastic.restore",
    "DistributedArray": "autopar.runtime.remote.arrays",
    "init": "autopar.session",
    "shutdown": "autopar.session",
    "Trace": "autopar.inspect.record",
    "read_trace": "autopar.inspect.record",
    "trace": "autopar.inspect.record",
    "run_training": "autopar.training.elastic.elastic",
    "verify": "autopar.measure.verify.verify_plan",
}

_views.provide_from("autopar.views")


def __getattr__(name: str) -> Any:
    """A public name, or a module of autopar, imported when it is first asked for."""
    module = _HOMES.get(name, f"{__name__}.{name}")
    try:
        if name in _HOMES:
            globals()[name] = getattr(importlib.import_module(module), name)
            return globals()[name]
        if not name.startswith("_"):
            return importlib.import_module(module)
    except ImportError as error:
        if error.name != module:
            from autopar._requirements import raise_if_missing

            raise_if_missing(error)
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
