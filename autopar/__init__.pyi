"""The one list of public names, and where each lives. `__init__.py` reads it too."""

from autopar.api import (
    ParallelFunction as ParallelFunction,
)
from autopar.api import (
    ShardingSolution as ShardingSolution,
)
from autopar.api import (
    compile as compile,
)
from autopar.api import (
    constrain as constrain,
)
from autopar.api import (
    expected_trips as expected_trips,
)
from autopar.api import (
    get_last_dp_result as get_last_dp_result,
)
from autopar.api import (
    mark_layer_boundary as mark_layer_boundary,
)
from autopar.api import (
    parallelize as parallelize,
)
from autopar.api import (
    plan as plan,
)
from autopar.api import (
    solve_sharding as solve_sharding,
)
from autopar.errors import (
    ArgumentError as ArgumentError,
)
from autopar.errors import (
    AutoparError as AutoparError,
)
from autopar.errors import (
    CheckpointError as CheckpointError,
)
from autopar.errors import (
    ClusterError as ClusterError,
)
from autopar.errors import (
    CompileError as CompileError,
)
from autopar.errors import (
    DataError as DataError,
)
from autopar.errors import (
    DependencyError as DependencyError,
)
from autopar.errors import (
    MemoryBudgetError as MemoryBudgetError,
)
from autopar.errors import (
    MeshError as MeshError,
)
from autopar.errors import (
    PlanError as PlanError,
)
from autopar.errors import (
    PlanningError as PlanningError,
)
from autopar.errors import (
    ProfileError as ProfileError,
)
from autopar.errors import (
    SolverError as SolverError,
)
from autopar.errors import (
    SpecError as SpecError,
)
from autopar.errors import (
    TraceError as TraceError,
)
from autopar.errors import (
    TraceFileError as TraceFileError,
)
from autopar.errors import (
    UntestedJaxWarning as UntestedJaxWarning,
)
from autopar.errors import (
    WorkerError as WorkerError,
)
from autopar.inspect.diff import diff as diff
from autopar.inspect.record import (
    Trace as Trace,
)
from autopar.inspect.record import (
    read_trace as read_trace,
)
from autopar.inspect.record import (
    trace as trace,
)
from autopar.ir.devices import (
    DeviceSpec as DeviceSpec,
)
from autopar.ir.mesh import (
    ClusterSpec as ClusterSpec,
)
from autopar.ir.mesh import (
    LogicalMesh as LogicalMesh,
)
from autopar.ir.plan import ParallelPlan as ParallelPlan
from autopar.ir.profile import (
    MachineProfile as MachineProfile,
)
from autopar.ir.profile import (
    load_profile as load_profile,
)
from autopar.measure.profile.profile_machine import profile_machine as profile_machine
from autopar.measure.verify.plan_verified import plan_verified as plan_verified
from autopar.measure.verify.report import VerifyReport as VerifyReport
from autopar.measure.verify.verify_plan import verify as verify
from autopar.methods import (
    AutoLayers as AutoLayers,
)
from autopar.methods import (
    AutoParallel as AutoParallel,
)
from autopar.methods import (
    AutoStages as AutoStages,
)
from autopar.methods import (
    CreateStateParallel as CreateStateParallel,
)
from autopar.methods import (
    DataParallel as DataParallel,
)
from autopar.methods import (
    FollowParallel as FollowParallel,
)
from autopar.methods import (
    ManualLayers as ManualLayers,
)
from autopar.methods import (
    ManualParallel as ManualParallel,
)
from autopar.methods import (
    ManualStages as ManualStages,
)
from autopar.methods import (
    PipeshardParallel as PipeshardParallel,
)
from autopar.methods import (
    ShardingOptions as ShardingOptions,
)
from autopar.methods import (
    ShardParallel as ShardParallel,
)
from autopar.methods import (
    UniformStages as UniformStages,
)
from autopar.methods import (
    Zero2Parallel as Zero2Parallel,
)
from autopar.methods import (
    Zero3Parallel as Zero3Parallel,
)
from autopar.runtime.checkpoints.find import (
    checkpoint_metadata as checkpoint_metadata,
)
from autopar.runtime.checkpoints.find import (
    checkpoint_steps as checkpoint_steps,
)
from autopar.runtime.checkpoints.find import (
    latest_step as latest_step,
)
from autopar.runtime.checkpoints.save import (
    CheckpointSave as CheckpointSave,
)
from autopar.runtime.checkpoints.save import (
    save_checkpoint as save_checkpoint,
)
from autopar.runtime.remote.arrays import DistributedArray as DistributedArray
from autopar.session import (
    init as init,
)
from autopar.session import (
    shutdown as shutdown,
)
from autopar.tracer.user_rules import register_rule as register_rule
from autopar.training.data_loader import (
    DataLoader as DataLoader,
)
from autopar.training.data_loader import (
    data_loader as data_loader,
)
from autopar.training.elastic import run_training as run_training
from autopar.training.keeping import (
    CheckpointPolicy as CheckpointPolicy,
)
from autopar.training.keeping import (
    NonFiniteError as NonFiniteError,
)
from autopar.training.metrics import (
    MetricsPolicy as MetricsPolicy,
)
from autopar.training.metrics import (
    PrometheusMetrics as PrometheusMetrics,
)
from autopar.training.metrics import (
    TensorBoardMetrics as TensorBoardMetrics,
)
from autopar.training.metrics import (
    TrainingMetrics as TrainingMetrics,
)
from autopar.training.metrics import (
    log_metrics as log_metrics,
)
from autopar.training.preemption import Preempted as Preempted
from autopar.training.restarts import RestartPolicy as RestartPolicy
from autopar.training.restore import restore_checkpoint as restore_checkpoint

__version__: str
__all__: list[str]
