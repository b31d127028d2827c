"""Executables: from a `PlannedStep` to what runs it, on devices of this process or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.inspect.dump import describing
from autopar.lower.lower_step import AbstractDevices, annotate, check_devices, lower_pipeline
from autopar.lower.planned_step import PlannedStep
from autopar.lower.remote_step import lower_for_workers
from autopar.runtime.local import LocalExecutable
from autopar.runtime.per_stage import PartsExecutable
from autopar.runtime.pipeline import PipelineExecutable
from autopar.runtime.remote.executable import RemoteExecutable
from autopar.runtime.remote.session import RemoteSession

Executable = LocalExecutable | PipelineExecutable | PartsExecutable | RemoteExecutable


def make_executable(
    planned: PlannedStep, devices: Sequence[Any]
) -> LocalExecutable | PipelineExecutable | PartsExecutable:
    if planned.made:
        check_devices(planned.plan, devices)
        parts = [
            _on_one_mesh(part, [devices[d] for d in stage.devices])
            for part, stage in zip(planned.made, planned.plan.stages, strict=True)
        ]
        executable = PartsExecutable(planned.plan, parts, whole=planned.traced.flat_fn)
    elif planned.plan.is_pipeline:
        lowered = lower_pipeline(planned, devices)
        executable = PipelineExecutable(
            planned.plan,
            lowered.pipeline,
            lowered.programs,
            lowered.functions,
            lowered.meshes,
            lowered.buffers,
            planned.traced.avals,
            lowered.tile_plans,
            whole=planned.traced.flat_fn,
        )
    else:
        executable = _on_one_mesh(planned, devices)
    executable.describe = describing(planned)
    return executable


def _on_one_mesh(planned: PlannedStep, devices: Sequence[Any]) -> LocalExecutable:
    flat_fn, mesh = annotate(planned, devices)
    traced = planned.traced
    return LocalExecutable(planned.plan, flat_fn, traced.avals, traced.donated, mesh)


def make_remote_executable(planned: PlannedStep, remote: RemoteSession) -> RemoteExecutable:
    """The step on the meshes of a cluster."""
    spec, traced = remote.cluster.spec, planned.traced
    devices = AbstractDevices(spec.num_hosts * spec.devices_per_host, remote.cluster.platform)
    executable = RemoteExecutable(
        planned.plan,
        lower_for_workers(planned, devices),
        remote,
        traced.avals,
        traced.out_avals,
        whole=traced.flat_fn,
    )
    executable.describe = describing(planned)
    return executable
