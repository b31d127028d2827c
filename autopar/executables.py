"""Executables: from a `PlannedStep` to what runs it, on devices of this process or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from autopar.ir.remote import LoweredStep
from autopar.lower.given_devices import devices_for
from autopar.lower.lower_step import (
    AbstractDevices,
    annotate,
    annotate_with_host_memory,
    lower_pipeline,
)
from autopar.lower.planned_step import PlannedStep
from autopar.lower.remote_step import lower_for_workers
from autopar.lower.tiles import plan_transfers
from autopar.runtime.host_memory import HostMemoryExecutable
from autopar.runtime.local import LocalExecutable
from autopar.runtime.pipeline import PipelineExecutable
from autopar.runtime.remote.executable import RemoteExecutable
from autopar.runtime.remote.session import RemoteSession


def make_executable(
    planned: PlannedStep, devices: Sequence[Any]
) -> LocalExecutable | PipelineExecutable | HostMemoryExecutable:
    """The step on devices of this process."""
    make = _make_pipeline if planned.plan.is_pipeline else _make_local
    if planned.traced.host is not None:
        make = _make_with_host_memory
    return make(planned, devices_for(planned, devices))


def _make_pipeline(planned: PlannedStep, devices: Sequence[Any]) -> PipelineExecutable:
    lowered = lower_pipeline(planned, devices)
    shares_memory = devices[0].platform == "cpu"
    return PipelineExecutable(
        planned.plan,
        lowered.pipeline,
        lowered.programs,
        lowered.functions,
        [mesh for mesh in lowered.meshes if isinstance(mesh, Mesh)],
        lowered.buffers,
        planned.traced.avals,
        planned.traced.flat_fn,
        {} if shares_memory else plan_transfers(lowered.pipeline, lowered.buffers),
    )


def _make_local(planned: PlannedStep, devices: Sequence[Any]) -> LocalExecutable:
    flat_fn, mesh = annotate(planned, devices)
    assert isinstance(mesh, Mesh)
    traced = planned.traced
    return LocalExecutable(planned.plan, flat_fn, traced.avals, traced.donated, mesh)


def _make_with_host_memory(planned: PlannedStep, devices: Sequence[Any]) -> HostMemoryExecutable:
    programs, mesh = annotate_with_host_memory(planned, devices)
    assert isinstance(mesh, Mesh)
    traced = planned.traced
    return HostMemoryExecutable(
        planned.plan, programs, traced.avals, traced.donated, mesh, traced.flat_fn
    )


def lower_for_cluster(planned: PlannedStep, remote: RemoteSession) -> LoweredStep:
    """The step's stage programs and lists of instructions, for the meshes of a cluster."""
    spec = remote.cluster.spec
    devices = AbstractDevices(spec.num_hosts * spec.devices_per_host, remote.cluster.platform)
    return lower_for_workers(planned, devices)


def make_remote_executable(
    planned: PlannedStep, remote: RemoteSession, lowered: LoweredStep | None = None
) -> RemoteExecutable:
    """The step on the meshes of a cluster. `lowered`: what was lowered for one of that size."""
    traced = planned.traced
    return RemoteExecutable(
        planned.plan,
        lowered or lower_for_cluster(planned, remote),
        remote,
        traced.avals,
        traced.out_avals,
        traced.flat_fn,
    )
