"""Diverse plans of a step: the choices of each cost model, known methods, and others.

    Example, clusters → (who chose it, PlannedStep) …

Besides the cost models' choices there are data parallelism and ZeRO, plans that split one product
differently from the best plan (`covering_plans`), plans that split several products at random, and
plans that keep some parameters replicated. The rest of each plan is optimal under that constraint,
so they range from near the best to twice as slow. Plans that compute a product redundantly on
several devices are left out, unless a cost model chooses one: XLA splits such a product anyway.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from math import inf
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
WITH_OVERLAP = ", overlap"  # after the name of a cost model, of what it chooses with overlap
KNOWN_METHODS = (autopar.DataParallel(), autopar.Zero2Parallel(), autopar.Zero3Parallel())


Plans = list[tuple[list[str], PlannedStep]]  # (cost models that choose it, plan) …


def plans_of(
    example: Example,
    clusters: dict[str, Any],
    limit: int,
    meshes: Sequence[tuple[int, ...]] = MESHES,
) -> Plans:
    """The plans that each cost model chooses, and `limit` others."""
    chosen = {
        name: _planned(example, cluster, autopar.ShardParallel())
        for name, cluster in clusters.items()
    }
    symbolic = next(iter(clusters.values()))
    return with_others(chosen, _others(example, symbolic, limit, meshes), limit)


def quick_plans_of(
    example: Example,
    clusters: dict[str, Any],
    limit: int,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    limit_s: float = inf,
) -> Plans:
    """The same in less time, with the choices of the default method on one mesh, with and without
    overlap in its prices. The other plans are known methods, the best of each mesh for the last
    cost model, and random ones, as many as `limit_s` seconds allow."""
    ends_s = time.monotonic() + limit_s
    chosen = {name: chosen_on_one_mesh(example, cluster) for name, cluster in clusters.items()}
    for name, cluster in clusters.items():
        chosen[f"{name}{WITH_OVERLAP}"] = chosen_on_one_mesh(example, cluster, overlap=True)
    others = _quick_others(example, list(clusters.values())[-1], meshes, MOST_TRIES * limit, ends_s)
    return with_others(chosen, others, limit, ends_s)


def with_others(
    chosen: dict[str, PlannedStep], others: Iterable[PlannedStep], limit: int, ends_s: float = inf
) -> Plans:
    """Different plans only; `limit` does not count the chosen ones."""
    found: dict[Any, tuple[list[str], PlannedStep]] = {}
    for name, planned in chosen.items():
        found.setdefault(_key(planned), ([], planned))[0].append(name)
    num_chosen = len(found)
    for planned in others:
        found.setdefault(_key(planned), ([], planned))
        if len(found) >= num_chosen + limit or time.monotonic() > ends_s:
            break
    return list(found.values())


def chosen_on_one_mesh(example: Example, cluster: Any, *, overlap: bool = False) -> PlannedStep:
    """What `@autopar.parallelize` uses where pipelines are out of the question."""
    arguments = (example.abstract_state(), example.abstract_batch())
    method = autopar.AutoParallel(options=autopar.ShardingOptions(overlap=overlap))
    return plan_step(
        example.train_step, arguments, {}, cluster=cluster, method=method, one_mesh=True
    )


def _quick_others(
    example: Example,
    cluster: Any,
    meshes: Sequence[tuple[int, ...]],
    num_tries: int,
    ends_s: float,
) -> Iterator[PlannedStep]:
    for method in KNOWN_METHODS:
        try:
            yield _planned(example, cluster, method)
        except autopar.AutoparError:  # does not fit into memory, or does not divide
            continue
    best = _best_on(example, cluster, meshes)
    yield from best
    yield from _in_turns(
        random_plans(example, cluster, meshes, num_tries, best, ends_s),
        pinned_plans(example, cluster, meshes, num_tries, ends_s),
    )


def _best_on(
    example: Example, cluster: Any, meshes: Sequence[tuple[int, ...]]
) -> list[PlannedStep]:
    found = []
    for shape in meshes:
        try:
            found.append(_planned(example, cluster, autopar.ShardParallel(shape)))
        except autopar.AutoparError:  # the mesh divides nothing, or memory is short
            continue
    return found


def _in_turns(*plans: Iterator[PlannedStep]) -> Iterator[PlannedStep]:
    for turn in itertools.zip_longest(*plans):
        yield from (planned for planned in turn if planned is not None)


def _others(
    example: Example, cluster: Any, limit: int, meshes: Sequence[tuple[int, ...]]
) -> Iterator[PlannedStep]:
    for method in KNOWN_METHODS:
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
    yield from _in_turns(
        random_plans(example, cluster, meshes, MOST_TRIES * limit),
        pinned_plans(example, cluster, meshes, MOST_TRIES * limit),
    )


def random_plans(
    example: Example,
    cluster: Any,
    meshes: Sequence[tuple[int, ...]],
    num_tries: int,
    best: Sequence[PlannedStep] = (),
    ends_s: float = inf,
) -> Iterator[PlannedStep]:
    """On a random mesh, splits some products at random over all devices; the rest is optimal under
    that constraint. `best`: the best plan of each mesh, if known."""
    rng = random.Random(0)
    spaces = []
    for planned in best or _best_on(example, cluster, meshes):
        origin: Any = planned.plan.origin
        problem = origin.problem(origin.graph, *origin.solver_constraints(origin.graph))
        spaces.append((origin, problem, decisions(problem)))
    for _ in range(num_tries):
        if time.monotonic() > ends_s:
            return
        origin, problem, labels = rng.choice(spaces)
        owners = rng.sample(list(labels), min(len(labels), rng.choice(NUM_FIXED)))
        fixed = {owner: rng.choice(_whole_mesh(problem, owner, labels)) for owner in owners}
        for solution in k_best(problem.pairwise, labels, 1, fixed=fixed):
            planned = planned_as(origin, sharding_of(problem, solution))
            if not _repeats_work(planned):
                yield planned


def pinned_plans(
    example: Example,
    cluster: Any,
    meshes: Sequence[tuple[int, ...]],
    num_tries: int,
    ends_s: float = inf,
) -> Iterator[PlannedStep]:
    """On a random mesh, pins some parameters as replicated and others as split; products are split
    optimally under these pins."""
    rng = random.Random(1)
    for _ in range(num_tries):
        if time.monotonic() > ends_s:
            return
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
