"""One expert's way to run a model: a hand-written layout with knobs, or a hand-written pipeline.

Expert, Example, devices → a jitted step, abstract state and batch with their shardings
Expert (a pipeline), Example, cluster → an autopar plan
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from examples.models import Example

from . import remat as remat_kinds
from .accumulation import accumulating_step
from .handwritten import HandWritten


@dataclass(frozen=True)
class Expert:
    """A candidate that an expert would run.

    name:              unique among all candidates.
    family:            the best of each family is reported.
    layout:            the mesh and the shardings; None for a pipeline.
    scan_layers:       whether layers are stacked and run by a loop, if the model supports it.
    remat:             one of `remat.KINDS`.
    num_micro_batches: parts of the batch over which gradients are accumulated.
    method:            of a pipeline: the stages, meshes and pins that an expert gives to autopar.
    wrap:              of a pipeline: names the values of the step for the pins.
    """

    name: str
    family: str
    layout: HandWritten | None = None
    scan_layers: bool = False
    remat: str = "none"
    num_micro_batches: int = 1
    method: autopar.PipeshardParallel | None = None
    wrap: Callable[[Any], Any] | None = None

    @property
    def is_pipeline(self) -> bool:
        return self.method is not None

    def example(self, example: Example) -> Example:
        """The model as this expert configures it: stacked layers, remat; for a pipeline, a step
        with named values."""
        fields = {field.name for field in dataclasses.fields(example.config)}
        wanted = {"scan_layers": self.scan_layers, "remat": self.remat != "none"}
        configured = example.replace(**{name: wanted[name] for name in wanted if name in fields})
        wrap = self.wrap
        if wrap is None:
            return configured
        plain = configured.family.make_train_step
        family = dataclasses.replace(configured.family, make_train_step=lambda c: wrap(plain(c)))
        return dataclasses.replace(configured, family=family)

    def step(self, example: Example, devices: Sequence[Any]) -> tuple[Any, Any, Any]:
        """(step, state, batch): `jax.jit` with shardings and the state donated, and abstract
        arguments with their shardings; `made` creates them."""
        if self.layout is None:
            raise ValueError(f"{self.name} is a pipeline: use Expert.plan(example, cluster)")
        layout, configured = self.layout, self.example(example)
        mesh = layout.mesh(devices)
        train_step = configured.train_step
        if self.num_micro_batches > 1:
            split = NamedSharding(mesh, P(None, *layout.batch))
            train_step = accumulating_step(
                configured,
                self.num_micro_batches,
                lambda parts: jax.lax.with_sharding_constraint(parts, split),
            )

        def step(state: Any, batch: Any) -> Any:
            saved = remat_kinds.SAVED.get(self.remat, ())
            with layout.annotate(mesh, saved), remat_kinds.keeping(self.remat):
                return train_step(state, batch)

        state, batch = configured.abstract_state(), configured.abstract_batch()
        places = layout.state_shardings(state, mesh, stacked=self.scan_layers)
        rows = jax.tree.map(lambda _: NamedSharding(mesh, layout.batch), batch)
        placed_state = jax.tree.map(_placed, state, places)
        return layout.jit_on(step, mesh, places), placed_state, jax.tree.map(_placed, batch, rows)

    def made(self, example: Example, devices: Sequence[Any]) -> tuple[Any, Any, Any]:
        """(step, state, batch) as `step` returns them, with arrays on the devices."""
        step, state, batch = self.step(example, devices)
        configured = self.example(example)
        places = jax.tree.map(lambda leaf: leaf.sharding, (state, batch))
        return step, *jax.device_put((configured.create_state(), configured.make_batch()), places)

    def plan(self, example: Example, cluster: autopar.ClusterSpec) -> autopar.ParallelPlan:
        """The pipeline's plan for the step of `example`, for `autopar.compile` or
        `autopar.parallelize(method=plan)`."""
        if self.method is None:
            raise ValueError(f"{self.name} is not a pipeline: use Expert.step(example, devices)")
        configured = self.example(example)
        arguments = (configured.abstract_state(), configured.abstract_batch())
        return autopar.plan(configured.train_step, *arguments, cluster=cluster, method=self.method)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
