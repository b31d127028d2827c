"""Diverse plans of a step: the choices of each cost model, known methods, and others.

    Example, clusters → (who chose it, PlannedStep) …

Besides the cost models' choices there are data parallelism and ZeRO, plans that split one product
differently from the best plan (`covering_plans`), plans that split several products at random, and
plans that keep some parameters replicated. The rest of each plan is optimal under that constraint,
so they range from near the best to twice as slow. Plans that compute a product redundantly on
several devices are left out, unless a cost model chooses one: XLA splits such a product anyway.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

import autopar
from autopar.compiler import plan_step
from autopar.cost.report import parallelism
from autopar.lower.planned_step import PlannedStep
from autopar.measure.candidates import decisions
from autopar.measure.enumerate_plans import covering_plans, strategies_in_words
from autopar.sharding.kbest import k_best, sharding_of
from autopar.sharding.plan_mesh import planned_as
from examples.models import Example

MESHES = ((8,), (2, 4), (4, 2))
NUM_FIXED = (2, 3, 4, 6, 8)  # products split at random
COVERING_SHARE = 0.25  # of the plans
MOST_TRIES = 4  # per requested plan


def plans_of(
    example: Example,
    clusters: dict[str, Any],
    limit: int,
    meshes: Sequence[tuple[int, ...]] = MESHES,
) -> list[tuple[list[str], PlannedStep]]:
    """(cost models that choose it, plan); `limit` counts only the other plans."""
    found: dict[Any, tuple[list[str], PlannedStep]] = {}
    for name, cluster in clusters.items():
        planned = _planned(example, cluster, autopar.ShardParallel())
        found.setdefault(_key(planned), ([], planned))[0].append(name)
    num_chosen = len(found)
    symbolic = next(iter(clusters.values()))
    for planned in _others(example, symbolic, limit, meshes):
        if len(found) >= num_chosen + limit:
            break
        found.setdefault(_key(planned), ([], planned))
    return list(found.values())


def _others(
    example: Example, cluster: Any, limit: int, meshes: Sequence[tuple[int, ...]]
) -> Iterator[PlannedStep]:
    for method in (autopar.DataParallel(), autopar.Zero2Parallel(), autopar.Zero3Parallel()):
        yield _planned(example, cluster, method)
    near = covering_plans(
        example.train_step,
        (example.abstract_state(), example.abstract_batch()),
        jax.devices()[: cluster.num_devices],
        round(COVERING_SHARE * limit),
        mesh_shapes=meshes,
        cluster=cluster,
    )
    yield from (planned for planned in near if not _repeats_work(planned))
    turns = zip(
        random_plans(example, cluster, meshes, MOST_TRIES * limit),
        pinned_plans(example, cluster, meshes, MOST_TRIES * limit),
        strict=False,
    )
    for pair in turns:
        yield from pair


def random_plans(
    example: Example, cluster: Any, meshes: Sequence[tuple[int, ...]], num_tries: int
) -> Iterator[PlannedStep]:
    """On a random mesh, splits some products at random over all devices; the rest is optimal under
    that constraint."""
    rng = random.Random(0)
    spaces = []
    for shape in meshes:
        origin: Any = _planned(example, cluster, autopar.ShardParallel(shape)).plan.origin
        problem = origin.problem(origin.graph, *origin.solver_constraints(origin.graph))
        spaces.append((origin, problem, decisions(problem)))
    for _ in range(num_tries):
        origin, problem, labels = rng.choice(spaces)
        owners = rng.sample(list(labels), min(len(labels), rng.choice(NUM_FIXED)))
        fixed = {owner: rng.choice(_whole_mesh(problem, owner, labels)) for owner in owners}
        for solution in k_best(problem.pairwise, labels, 1, fixed=fixed):
            planned = planned_as(origin, sharding_of(problem, solution))
            if not _repeats_work(planned):
                yield planned


def pinned_plans(
    example: Example, cluster: Any, meshes: Sequence[tuple[int, ...]], num_tries: int
) -> Iterator[PlannedStep]:
    """On a random mesh, pins some parameters as replicated and others as split; products are split
    optimally under these pins."""
    rng = random.Random(1)
    for _ in range(num_tries):
        shape = rng.choice(list(meshes))
        options = autopar.ShardingOptions(pins=random_pins(example, shape, rng))
        try:
            planned = _planned(example, cluster, autopar.ShardParallel(shape, options=options))
        except autopar.AutoparError:  # infeasible pins
            continue
        if not _repeats_work(planned):
            yield planned


def random_pins(
    example: Example, shape: tuple[int, ...], rng: random.Random
) -> dict[str, PartitionSpec]:
    """Random layouts of parameters, equal for equal layers; a third of them stay free."""
    groups: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree.leaves_with_path(example.abstract_state().params):
        if len(leaf.shape) > 1:
            names = [str(getattr(key, "key", key)) for key in path]
            groups["state.params*" + "".join(f"['{name}']" for name in names[-2:])] = leaf.shape
    pins = {}
    for pattern, size in groups.items():
        how = rng.choice(("whole", "split", "free"))
        spec: list[Any] = [None] * len(size)
        for axis, ranks in zip(("x", "y"), shape, strict=False):
            dim = rng.randrange(len(size))
            if how == "split" and spec[dim] is None and size[dim] % ranks == 0:
                spec[dim] = axis
        if how != "free":
            pins[pattern] = PartitionSpec(*spec)
    return pins


def _whole_mesh(problem: Any, owner: int, labels: Any) -> list[Any]:
    """Labels of the strategies in which all devices share the work."""
    mesh = problem.mesh
    return [
        label
        for label in dict.fromkeys(labels[owner])
        if parallelism(label, mesh) == mesh.num_devices
    ] or list(dict.fromkeys(labels[owner]))


def _planned(example: Example, cluster: Any, method: Any) -> PlannedStep:
    arguments = (example.abstract_state(), example.abstract_batch())
    return plan_step(example.train_step, arguments, {}, cluster=cluster, method=method)


def _repeats_work(planned: PlannedStep) -> bool:
    return any("replicated" in words for _, words in strategies_in_words(planned.plan))


def _key(planned: PlannedStep) -> Any:
    """A key that equal plans share."""
    plan = planned.plan
    origin: Any = plan.origin
    return plan.mesh_shape, origin.refetch, tuple(sorted(origin.choice.items()))
