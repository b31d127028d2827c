"""The step of a plan as judged: seconds of its compiled programs → `JudgedStep`.

On one mesh that is the program's own figure. In a pipeline, the predicted stage programs of each
mesh are scaled to what the judge found for them together, and the step is simulated again;
transfers between meshes stay as predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.ir.judged import JudgedStep
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import PipelineTimes
from autopar.measure.judge import judge
from autopar.runtime.executable import Executable
from autopar.stages.simulate import predicted_timeline


def added_runs(programs: Iterable[tuple[int, JudgedStep]]) -> JudgedStep:
    """(runs in a step, seconds of one) of all programs of a mesh, one after another."""
    step_s = compute_s = links_s = exposed_s = 0.0
    for runs, one in programs:
        step_s += runs * one.step_s
        compute_s += runs * one.compute_s
        links_s += runs * one.links_s
        exposed_s += runs * one.exposed_s
    return JudgedStep(step_s, compute_s, links_s, exposed_s)


def judged_step(plan: ParallelPlan, meshes: Sequence[JudgedStep]) -> JudgedStep:
    """`meshes`: all that each mesh runs in a step. Kernels and collectives are those of the busiest
    mesh."""
    busiest = max(meshes, key=lambda mesh: mesh.step_s)
    if not plan.is_pipeline or not plan.schedule or plan.times is None:
        return busiest
    scaled = replace(plan, times=_scaled(plan, plan.times, meshes))
    return replace(busiest, step_s=max(busiest.step_s, predicted_timeline(scaled).step_s))


def _scaled(
    plan: ParallelPlan, times: PipelineTimes, meshes: Sequence[JudgedStep]
) -> PipelineTimes:
    """The stage programs of each mesh by one factor."""
    mesh_of = [stage.mesh for stage in plan.stages]
    predicted = predicted_timeline(plan).busy_s()
    factors = [
        mesh.step_s / seconds if seconds else 1.0
        for mesh, seconds in zip(meshes, predicted, strict=True)
    ]
    stage_programs = tuple(
        replace(one, seconds=factors[mesh_of[one.stage]] * one.seconds)
        for one in times.stage_programs
    )
    return replace(times, stage_programs=stage_programs)


def judged_executable(executable: Executable, cluster: ClusterSpec) -> JudgedStep:
    """A step that is compiled in this process; the judge reads its programs' HLO."""
    plan, runs, texts = executable.plan, executable.num_runs(), executable.hlo_texts()
    if not plan.is_pipeline:
        whole = _alone(cluster, plan.num_devices)
        return judged_step(plan, [added_runs((runs[n], judged(texts[n], whole)) for n in texts)])
    meshes: dict[int, list[tuple[int, JudgedStep]]] = {stage.mesh: [] for stage in plan.stages}
    for label in executable.description.stage_programs:
        stage = plan.stages[label.stage]
        found = judged(texts[label.name], _alone(cluster, len(stage.devices)))
        meshes[stage.mesh].append((runs.get(label.name, 0), found))
    return judged_step(plan, [added_runs(meshes[mesh]) for mesh in sorted(meshes)])


def judged(hlo_text: str, cluster: ClusterSpec) -> JudgedStep:
    """One run of a program."""
    found = judge(hlo_text, cluster)
    return JudgedStep(found.step_s, found.compute_s, found.links_s, found.exposed_s)


def _alone(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """So many of a cluster's devices, numbered from zero as a program of theirs numbers them."""
    on_host = min(num_devices, cluster.devices_per_host)
    return ClusterSpec(-(-num_devices // on_host), on_host, device=cluster.spec)
