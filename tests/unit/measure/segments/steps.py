"""Steps with segments for these tests, and times that nobody measured."""

from __future__ import annotations

import random
from functools import cache

import jax

from autopar.ir.mesh import ClusterSpec
from autopar.ir.profile import Timing
from autopar.measure.segments.analyse import PreparedStep, analyse
from autopar.measure.segments.boundaries import reshards
from autopar.measure.segments.files import (
    Analysis,
    CombinationTime,
    DispatchTime,
    ReshardTime,
    SegmentProfile,
)
from autopar.measure.segments.passes import prepare_step
from autopar.measure.segments.profile import new_profile, segment_layouts
from examples.models import build


@cache
def prepared(
    name: str = "mlp-tiny", mesh: tuple[int, ...] = (8,), memory: float | None = None, **options
) -> PreparedStep:
    example = build(name, batch_size=16, **options)
    args = (example.abstract_state(), example.abstract_batch())
    cluster = ClusterSpec(1, 8, "cpu", memory_bytes=memory)
    return prepare_step(example.train_step, args, {}, cluster, mesh)


@cache
def analysed(step: PreparedStep, top: int = 4) -> Analysis:
    return analyse(step, top=top)


def random_profile(step: PreparedStep, analysis: Analysis, seed: int) -> SegmentProfile:
    """Every sample that the search needs, at random."""
    rng = random.Random(seed)
    profile = new_profile(step, jax.devices())
    for space in analysis.meshes:
        mesh = step.mesh(space.shape)
        layouts = []
        for own in space.segments:
            layouts.append(segment_layouts(step, mesh, own))
            call = Timing(rng.uniform(0.1, 0.2))
            profile = profile.with_sample(DispatchTime(own.key, mesh.shape, call))
            for c in own.combinations:
                time = Timing(rng.uniform(1.0, 2.0))
                sample = CombinationTime(own.key, mesh.shape, c.digest, time, 1e6, 0.0)
                profile = profile.with_sample(sample)
        profile = profile.with_sample(DispatchTime("", mesh.shape, Timing(0.05)))
        for move in reshards(step.cut, space, layouts):
            time = Timing(rng.uniform(0.1, 1.0))
            ends = move.source, move.target
            sample = ReshardTime(mesh.shape, move.shape, move.dtype, *ends, time)
            profile = profile.with_sample(sample)
    return profile
