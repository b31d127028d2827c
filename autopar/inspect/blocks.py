"""The blocks of a plan: from a `ParallelPlan` to `Blocks` with what was chosen and what it costs.

The solver's problem is rebuilt (`sharding.origin`). A resharding is charged to the block that reads
the value, and state that returns to its layout to the block that makes it, so blocks add up to the
plan's compute and communication.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autopar.cost.halo import halo_steps
from autopar.cost.module_names import with_module_names
from autopar.cost.parallelism_labels import ParallelismLabels
from autopar.cost.plan_details import rounded, spec_text
from autopar.cost.report import moves, node_compute_s
from autopar.cost.roles import find_roles
from autopar.errors import ArgumentError, PlanError
from autopar.inspect.plan_origin import origin_of
from autopar.ir.blocks import Block, Blocks, Occurrence
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import name_pattern, name_skeleton
from autopar.sharding.solve import GraphSharding
from autopar.tracer.source_lines import EquationLines, equation_lines

_Costs = tuple[float, float, float]  # compute seconds, communication seconds, bytes sent


def blocks_of(plan: ParallelPlan, stage: int = 0) -> Blocks:
    """The blocks of a plan on one mesh, or of one stage of a pipeline."""
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < plan.num_stages:
        raise ArgumentError(
            f"plan.blocks(stage={stage!r}): needs the number of a stage, counted from 0; this plan "
            f"has {plan.num_stages}."
        )
    mesh_plan = plan.stages[stage].plan or plan
    if mesh_plan.num_devices == 1:
        raise PlanError(
            f"plan.blocks(): {mesh_plan.name} is planned for one device, so no operator has a "
            "strategy to choose. Plan for more devices."
        )
    origin = origin_of(mesh_plan, "blocks()")
    lines = equation_lines(origin.step.program)
    return chosen_blocks(origin.blocks, origin.sharding, lines)


def chosen_blocks(blocks: Blocks, sharding: GraphSharding, lines: EquationLines) -> Blocks:
    """The blocks with the strategies of a sharding, in words, and their costs."""
    problem = sharding.problem
    roles = find_roles(sharding.graph, lines.recomputed, problem.classes)
    graph = with_module_names(sharding.graph, roles)
    factors = [strategy.factors for strategy in sharding.strategies]
    words = ParallelismLabels(
        graph, sharding.mesh, sharding.layouts, factors, roles, lines.recomputed
    )
    costs = _costs(blocks, sharding)
    occurrences: dict[int, list[Occurrence]] = defaultdict(list)
    for occurrence in blocks.sequence:
        occurrences[occurrence.block].append(occurrence)

    def with_choice(at: int, block: Block) -> Block:
        node = graph.nodes[block.entry]
        chosen = sharding.choice[block.owner]
        layout = sharding.layouts[block.entry][1][0]
        strategy = next((s for s in block.strategies if s.index == chosen), None)
        num_deviating = len(block.nodes) - 1
        if strategy is not None:
            choices = [sharding.choice[problem.classes[n]] for n in block.nodes]
            num_deviating = sum(a != b for a, b in zip(choices, strategy.nodes, strict=True))
        compute_s, communication_s, sent_bytes = costs[at]
        return replace(
            block,
            module=_pattern([graph.nodes[one.entry].module for one in occurrences[at]]),
            strategies=tuple(
                replace(s, words=words.of_strategy(block.entry, _factors(sharding, block, s.index)))
                for s in block.strategies
            ),
            source="" if node.equation is None else lines.sources[node.equation],
            chosen=chosen,
            words=words.of_strategy(block.entry, _factors(sharding, block, chosen)),
            spec=spec_text(
                layout, len(graph.values[node.results[0]].shape), sharding.mesh.axis_names
            ),
            num_deviating=num_deviating,
            compute_s=rounded(compute_s),
            communication_s=rounded(communication_s),
            communication_bytes=rounded(sent_bytes),
        )

    return replace(blocks, blocks=tuple(with_choice(at, b) for at, b in enumerate(blocks.blocks)))


def _factors(sharding: GraphSharding, block: Block, index: int) -> tuple[int, ...]:
    return sharding.problem.strategies[block.owner][index].factors


def _pattern(names: list[str]) -> str:
    """Modules of equal layers as one name."""
    if len({name_skeleton(name) for name in names}) > 1:
        return names[0]
    return name_pattern(names)


def _costs(blocks: Blocks, sharding: GraphSharding) -> list[_Costs]:
    """Per block, of all its occurrences."""
    graph, mesh, layouts = sharding.graph, sharding.mesh, sharding.layouts
    owner = [blocks.sequence[at].block for _, at in sorted(blocks.block_of_node.items())]
    compute = [0.0] * len(blocks.blocks)
    seconds = [0.0] * len(blocks.blocks)
    sent = [0.0] * len(blocks.blocks)
    known: dict[tuple, float] = {}
    for index, node in enumerate(graph.nodes):
        key = (sharding.problem.classes[index], node.touched_bytes, node.flops, node.weight)
        if key not in known:
            known[key] = node_compute_s(graph, mesh, node, layouts[index])
        compute[owner[index]] += known[key]
        if node.rule.halos:
            for _, shift_s, num_bytes, _ in halo_steps(node, graph.values, mesh, layouts[index][0]):
                seconds[owner[index]] += node.weight * shift_s
                sent[owner[index]] += node.weight * num_bytes
    for move in moves(graph, mesh, layouts):
        at = owner[move.producer if move.to_state else move.consumer]
        seconds[at] += move.weight * move.seconds
        if graph.values[move.value].shape:
            sent[at] += move.weight * sum(step.sent_bytes for step, *_ in move.steps)
    return list(zip(compute, seconds, sent, strict=True))
