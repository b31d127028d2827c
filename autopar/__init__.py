"""autopar: a single-device JAX train step, run well on many devices, by itself."""

from autopar import views as _views  # noqa: F401  # makes plans readable
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
from autopar.checkpoints import CheckpointSave, checkpoint_steps, latest_step, save_checkpoint
from autopar.compiler import register_rule
from autopar.errors import (
    ArgumentError,
    AutoparError,
    CheckpointError,
    ClusterError,
    CompileError,
    DataError,
    MemoryBudgetError,
    MeshError,
    PlanError,
    ProfileError,
    SolverError,
    SpecError,
    TraceError,
    TraceFileError,
    WorkerError,
)
from autopar.inspect.diff import diff
from autopar.ir.mesh import ClusterSpec, DeviceSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.ir.profile import MachineProfile, load_profile
from autopar.loading import DataLoader, data_loader
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
from autopar.profiling import profile_machine
from autopar.proof.report import VerifyReport
from autopar.proved_plans import plan_verified
from autopar.restoring import restore_checkpoint
from autopar.runtime.remote.arrays import DistributedArray
from autopar.session import init, shutdown
from autopar.tracing import Trace, read_trace, trace
from autopar.training import run_training
from autopar.verifying import verify

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
