"""A pipeline of two stages, cut by hand: tanh(x·w0)·w1, gradients clipped by their global norm.

Stage 0 holds w0, its momentum and the number of steps, stage 1 holds w1. The norm needs a scalar of
each stage on the other, between the two parts of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.pipeline import EACH, Phase, Pipeline, Place, Ref, StageProgram, Transfer
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import make_schedule
from autopar.runtime.pipeline import PipelineExecutable

ROWS, WIDTH, HIDDEN, OUT = 16, 8, 16, 4
RATE, CLIP = 0.1, 0.5

# Arguments and results.
W0, MOMENTUM, COUNT, W1, X, Y = range(6)
NEW_W0, NEW_MOMENTUM, NEW_COUNT, NEW_W1, LOSS = range(10, 15)
# Per micro-batch.
X_PART, Y_PART, H, ERROR, DH = range(20, 25)
# Once per step.
SUM0, SUM1, LOSS_SUM, NORM0, NORM1 = range(30, 35)


def step(w0: Any, momentum: Any, count: Any, w1: Any, x: Any, y: Any) -> list[Any]:
    """The whole, for `jax.jit`."""

    def loss_fn(w0: Any, w1: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w0) @ w1 - y) ** 2)

    loss, (g0, g1) = jax.value_and_grad(loss_fn, (0, 1))(w0, w1)
    scale = _scale(jnp.sum(g0**2), jnp.sum(g1**2))
    momentum = 0.9 * momentum + scale * g0
    return [w0 - RATE * momentum, momentum, count + 1, w1 - RATE * scale * g1, loss]


def _scale(norm0: Any, norm1: Any) -> Any:
    return jnp.minimum(1.0, CLIP / jnp.sqrt(norm0 + norm1))


def arguments() -> list[Any]:
    rng = np.random.default_rng(0)
    w0, x = rng.normal(size=(WIDTH, HIDDEN)), rng.normal(size=(ROWS, WIDTH))
    w1, y = rng.normal(size=(HIDDEN, OUT)), rng.normal(size=(ROWS, OUT))
    floats = [a.astype(np.float32) for a in (w0, np.zeros_like(w0), w1, x, y)]
    return [floats[0], floats[1], np.int32(0), *floats[2:]]


INPUTS = (
    Place(W0, 0), Place(MOMENTUM, 0), Place(COUNT, 0), Place(W1, 1), Place(X, 0), Place(Y, 1),
)  # fmt: skip
OUTPUTS = (
    Place(NEW_W0, 0), Place(NEW_MOMENTUM, 0), Place(NEW_COUNT, 0), Place(NEW_W1, 1), Place(LOSS, 1),
)  # fmt: skip


def make_stage_programs(
    num_micro_batches: int,
) -> list[tuple[StageProgram, Callable[..., Sequence[Any]]]]:
    def once(*values: int) -> tuple[Ref, ...]:
        return tuple(Ref(value, None) for value in values)

    def each(*values: int) -> tuple[Ref, ...]:
        return tuple(Ref(value, EACH) for value in values)

    def parts(value: int) -> tuple[Ref, ...]:
        return tuple(Ref(value, number) for number in range(num_micro_batches))

    def stage_program(
        stage: int, phase: Phase, reads: tuple[Ref, ...], writes: tuple[Ref, ...], part: int = 0
    ) -> Callable[[Any], tuple[StageProgram, Any]]:
        return lambda fn: (StageProgram(stage, phase, reads, writes, part), fn)

    @stage_program(0, Phase.PREPARE, once(X), (*parts(X_PART), *once(SUM0)))
    def prepare0(x):
        return [*jnp.split(x, num_micro_batches), jnp.zeros((WIDTH, HIDDEN))]

    @stage_program(1, Phase.PREPARE, once(Y), (*parts(Y_PART), *once(SUM1, LOSS_SUM)))
    def prepare1(y):
        return [*jnp.split(y, num_micro_batches), jnp.zeros((HIDDEN, OUT)), jnp.zeros(())]

    @stage_program(0, Phase.FORWARD, (*once(W0), *each(X_PART)), each(H))
    def forward0(w0, x):
        return [jnp.tanh(x @ w0)]

    @stage_program(1, Phase.FORWARD, (*once(W1), *each(H, Y_PART), *once(LOSS_SUM)),
           (*each(ERROR), *once(LOSS_SUM)))  # fmt: skip
    def forward1(w1, h, y, loss_sum):
        error = h @ w1 - y
        return [error * (2 / (ROWS * OUT)), loss_sum + jnp.sum(error**2)]

    @stage_program(
        1, Phase.BACKWARD, (*once(W1), *each(H, ERROR), *once(SUM1)), (*each(DH), *once(SUM1))
    )
    def backward1(w1, h, error, total):
        return [error @ w1.T, total + h.T @ error]

    @stage_program(0, Phase.BACKWARD, (*each(X_PART, H, DH), *once(SUM0)), once(SUM0))
    def backward0(x, h, dh, total):
        return [total + x.T @ (dh * (1 - h**2))]

    @stage_program(0, Phase.UPDATE, once(SUM0), once(NORM0))
    def norm0(total):
        return [jnp.sum(total**2)]

    @stage_program(1, Phase.UPDATE, once(SUM1), once(NORM1))
    def norm1(total):
        return [jnp.sum(total**2)]

    @stage_program(0, Phase.UPDATE, once(W0, MOMENTUM, COUNT, SUM0, NORM0, NORM1),
           once(NEW_W0, NEW_MOMENTUM, NEW_COUNT), 1)  # fmt: skip
    def update0(w0, momentum, count, total, norm0, norm1):
        momentum = 0.9 * momentum + _scale(norm0, norm1) * total
        return [w0 - RATE * momentum, momentum, count + 1]

    @stage_program(1, Phase.UPDATE, once(W1, SUM1, LOSS_SUM, NORM0, NORM1), once(NEW_W1, LOSS), 1)
    def update1(w1, total, loss_sum, norm0, norm1):
        return [w1 - RATE * _scale(norm0, norm1) * total, loss_sum / (ROWS * OUT)]

    return [prepare0, prepare1, forward0, forward1, backward1, backward0,
            norm0, norm1, update0, update1]  # fmt: skip


TRANSFERS = (
    Transfer(Ref(H, EACH), 0, 1),
    Transfer(Ref(DH, EACH), 1, 0),
    Transfer(Ref(NORM0, None), 0, 1),
    Transfer(Ref(NORM1, None), 1, 0),
)


def make_avals(num_micro_batches: int) -> dict[int, Any]:
    part = ROWS // num_micro_batches
    weights = dict.fromkeys((W0, MOMENTUM, NEW_W0, NEW_MOMENTUM, SUM0), (WIDTH, HIDDEN))
    weights |= dict.fromkeys((W1, NEW_W1, SUM1), (HIDDEN, OUT))
    rows = {X: (ROWS, WIDTH), Y: (ROWS, OUT), X_PART: (part, WIDTH), Y_PART: (part, OUT)}
    rows |= {H: (part, HIDDEN), DH: (part, HIDDEN), ERROR: (part, OUT)}
    scalars = dict.fromkeys((LOSS, LOSS_SUM, NORM0, NORM1), ())
    avals: dict[int, Any] = {
        value: jax.ShapeDtypeStruct(shape, jnp.float32)
        for value, shape in (weights | rows | scalars).items()
    }
    return avals | dict.fromkeys((COUNT, NEW_COUNT), jax.ShapeDtypeStruct((), jnp.int32))


@dataclass(frozen=True)
class NamedPlan:
    """As much of a plan as the runtime reads."""

    name: str = "step"
    estimated_peak_bytes: float = 0.0
    xla_options: None = None

    def to_json(self) -> str:
        return "{}"

    def explain(self, *, detail: str = "short") -> str:
        return f"{self.name}, {detail}"


SPECS = {
    0: {H: P("x", "y"), DH: P("x", "y")}
    | dict.fromkeys((W0, MOMENTUM, NEW_W0, NEW_MOMENTUM, SUM0), P(None, "y"))
    | dict.fromkeys((X, X_PART), P("x")),
    # H lies otherwise than on stage 0.
    1: {H: P("x", "y"), DH: P("x")}
    | dict.fromkeys((W1, NEW_W1, SUM1), P("y"))
    | dict.fromkeys((Y, Y_PART, ERROR), P("x")),
}


def make_meshes(mesh_shapes: Sequence[tuple[int, int]]) -> list[Mesh]:
    meshes, first = [], 0
    for shape in mesh_shapes:
        last = first + shape[0] * shape[1]
        meshes.append(Mesh(np.array(jax.devices()[first:last]).reshape(shape), ("x", "y")))
        first = last
    return meshes


def make_buffers(
    mesh_shapes: Sequence[tuple[int, int]],
    num_micro_batches: int = 4,
    stage_mesh: tuple[int, int] = (0, 1),
) -> dict[tuple[int, int], jax.ShapeDtypeStruct]:
    meshes = make_meshes(mesh_shapes)
    return {
        (stage, value): jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            sharding=NamedSharding(meshes[stage_mesh[stage]], SPECS[stage].get(value, P())),
        )
        for stage in (0, 1)
        for value, aval in make_avals(num_micro_batches).items()
    }


def make_executable(
    mesh_shapes: tuple[tuple[int, int], ...] = ((1, 2), (2, 2)),
    num_micro_batches: int = 4,
    schedule: str = "1f1b",
    stage_mesh: tuple[int, int] = (0, 1),
    donated: frozenset[int] = frozenset((W0, MOMENTUM, COUNT, W1)),
    **options: Any,
) -> PipelineExecutable:
    stage_programs = make_stage_programs(num_micro_batches)
    avals = make_avals(num_micro_batches)
    pipeline = Pipeline(
        num_micro_batches,
        stage_mesh,
        tuple(stage_program for stage_program, _ in stage_programs),
        TRANSFERS,
        INPUTS,
        OUTPUTS,
        donated,
    )
    plan: Any = NamedPlan()
    return PipelineExecutable(
        plan,
        pipeline,
        emit_programs(
            pipeline, make_schedule(schedule, 2, num_micro_batches, stage_mesh=stage_mesh)
        ),
        [fn for _, fn in stage_programs],
        make_meshes(mesh_shapes),
        make_buffers(mesh_shapes, num_micro_batches, stage_mesh),
        [avals[place.value] for place in INPUTS],
        step,
        **options,
    )
