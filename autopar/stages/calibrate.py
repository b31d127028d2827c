"""How far tables are off in memory: from stages, solved by themselves, to a search that knows it.

Tables take the memory of a stage from a sharding of the whole step. A stage's own program keeps
other values, and its peak may be higher than the tables say. Then stages that fit by the tables
have to save memory, at a price that the search did not see. So the stages of its best pipeline are
sharded by themselves, without a budget, and compared with the table that has no price of memory:

    excess of a submesh = the largest ratio of the two peaks.

The search is repeated with budgets divided by that, until its stages were all compared. A stage on
each submesh is enough, the fullest one. What is solved here is not solved again for the plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from autopar.errors import MeshError, SolverError, SpecError
from autopar.ir.stages import LayerTable, StageChoice, Submesh
from autopar.lower.schedules import in_flight_bound
from autopar.methods import ShardParallel
from autopar.sharding.plan_mesh import ShardingTask, cheapest_peak, mesh_problem
from autopar.stages.choose_stages import StageSearch, search_within
from autopar.stages.looped import LoopedStep, StageSpec
from autopar.stages.pipeline_task import PipelineTask
from autopar.stages.stage_plans import StageTask, unbounded_peak

MOST_ROUNDS = 3
_SHARE = 0.3  # of the time left, for all rounds
_CLOSE = 1.02  # an excess that is no reason to search again
FULL = 0.3  # share of the budget from which on a stage may turn out not to fit


def calibrated(
    task: PipelineTask,
    looped: LoopedStep,
    search: StageSearch,
    excess: dict[Submesh, float],
    rounds: int = MOST_ROUNDS,
) -> StageSearch:
    """The search once more, as long as its best stages take more memory than it thought, for so
    many rounds at most. `excess` has what is known, and takes what is found."""
    if not _is_worthwhile(task, search):
        return search
    deadline, took_s = task.log.deadline.part(_SHARE), 0.0
    for _ in range(rounds):
        if search.choice is None:
            break
        if not deadline.allows(took_s):
            deadline.cut("the memory of single stages")
            break
        started = time.monotonic()
        found = _excess(task, looped, search)
        new = {s: e for s, e in found.items() if e > _CLOSE * excess.get(s, 1.0)}
        if not new:
            break
        excess.update(new)
        search = search_within(search, excess, task.log)
        took_s = time.monotonic() - started
    return search


def _is_worthwhile(task: PipelineTask, search: StageSearch) -> bool:
    """Whether memory matters, and stages are what the tables have."""
    options = task.method.options
    is_plain = not (options.pins or options.forbid_axes or options.batch_axis or task.pins)
    return is_plain and search.setting is not None and task.method.schedule != "interleaved_1f1b"


def _excess(task: PipelineTask, looped: LoopedStep, search: StageSearch) -> dict[Submesh, float]:
    """Submesh -> the ratio of a stage's peak to that of its table, for the fullest stage there."""
    assert search.choice is not None
    stages, setting = search.choice.stages, search.within
    fullest: dict[Submesh, int] = {}
    for k, stage in enumerate(stages):
        if stage.peak_bytes < FULL * setting.budget_bytes(stage.submesh):
            continue
        known = fullest.setdefault(stage.submesh, k)
        if stage.peak_bytes > stages[known].peak_bytes:
            fullest[stage.submesh] = k
    if not fullest:
        return {}
    if task.is_one_program(stages) and not stages[0].remat:
        return _excess_of_one_program(task, looped, stages[0], search)
    specs = [StageSpec(s.layers, s.submesh, s.mesh_shape, s.remat) for s in stages]
    sliced = task.sliced(looped, specs)
    number = looped.step.num_micro_batches
    excess: dict[Submesh, float] = {}
    for submesh, k in fullest.items():
        cut, stage = sliced.stages[k], stages[k]
        in_flight = in_flight_bound(task.method.schedule, len(stages), number, k)
        stage_task = StageTask(cut, submesh, stage.mesh_shape, in_flight, built=task.graph_of(cut))
        try:
            peak = unbounded_peak(
                stage_task, task.cluster, task.method.options, task.known, task.log
            )
        except (MeshError, SolverError, SpecError):
            continue
        expected = _table_peak(stage, search.plain, in_flight)
        if expected:
            excess[submesh] = peak / expected
    return excess


def _excess_of_one_program(
    task: PipelineTask, looped: LoopedStep, stage: StageChoice, search: StageSearch
) -> dict[Submesh, float]:
    """The same of a stage that will be one program: the step whose graph tables were made of."""
    step, options = looped.step, task.method.options
    number = step.num_micro_batches
    method = ShardParallel(stage.mesh_shape, num_micro_batches=number, options=options)
    try:
        problem = mesh_problem(ShardingTask(step, task.cluster, method), task.log)
        peak = cheapest_peak(problem, task.log)
    except (MeshError, SolverError, SpecError):
        return {}
    expected = _table_peak(stage, search.plain, 1)
    return {stage.submesh: peak / expected} if expected else {}


def _table_peak(
    stage: StageChoice,
    plain: Mapping[tuple[Submesh, tuple[int, ...], bool], LayerTable],
    in_flight: int,
) -> float:
    """The peak by the table without a price of memory; 0 if there is none."""
    table = plain.get((stage.submesh, stage.mesh_shape, stage.remat))
    if table is None:
        return 0.0
    layers = slice(*stage.layers)
    held = table.held_bytes[layers].sum() + in_flight * table.in_flight_bytes[layers].sum()
    return float(held + table.working_bytes[layers].max())
