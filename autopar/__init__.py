"""autopar: a single-device JAX train step, run well on many devices, by itself."""

from autopar.api import (
    ParallelFunction,
    ShardingSolution,
    compile,
    constrain,
    init,
    parallelize,
    plan,
    shutdown,
    solve_sharding,
)
from autopar.compiler import register_rule
from autopar.errors import (
    ArgumentError,
    AutoparError,
    CompileError,
    MemoryBudgetError,
    MeshError,
    PlanError,
    SolverError,
    SpecError,
    TraceError,
)
from autopar.ir.mesh import ClusterSpec, DeviceSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.methods import (
    CreateStateParallel,
    DataParallel,
    FollowParallel,
    ManualParallel,
    ShardingOptions,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AutoparError",
    "ClusterSpec",
    "CompileError",
    "CreateStateParallel",
    "DataParallel",
    "DeviceSpec",
    "FollowParallel",
    "LogicalMesh",
    "ManualParallel",
    "MemoryBudgetError",
    "MeshError",
    "ParallelFunction",
    "ParallelPlan",
    "PlanError",
    "ShardParallel",
    "ShardingOptions",
    "ShardingSolution",
    "SolverError",
    "SpecError",
    "TraceError",
    "Zero2Parallel",
    "Zero3Parallel",
    "compile",
    "constrain",
    "init",
    "parallelize",
    "plan",
    "register_rule",
    "shutdown",
    "solve_sharding",
]
