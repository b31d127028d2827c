"""The blocks of a plan: from a `ParallelPlan` to `Blocks` with what was chosen and what it costs.

The problem that the solver had is built again (`origin`), and its blocks are found. What is moved
is charged to the block of the node that reads it, and state on its way back to where it is kept to
the block that makes it, so that blocks add up to the plan's own compute and communication.
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

_Figures = tuple[float, float, float]  # seconds of compute and of communication, bytes sent


def blocks_of(plan: ParallelPlan, stage: int = 0) -> Blocks:
    """Of a plan on one mesh, or of one stage of a pipeline."""
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < plan.num_stages:
        raise ArgumentError(
            f"plan.blocks(stage={stage!r}): needs the number of a stage; this plan has "
            f"{plan.num_stages}, counted from 0."
        )
    own = plan.stages[stage].plan or plan
    if own.num_devices == 1:
        raise PlanError(
            f"plan.blocks(): {own.name} is planned for one device, where nothing is split and "
            "there are no strategies to choose from. Plan for more devices."
        )
    origin = origin_of(own, "blocks()")
    lines = equation_lines(origin.step.program)
    return chosen_blocks(origin.blocks, origin.sharding, lines)


def chosen_blocks(blocks: Blocks, sharding: GraphSharding, lines: EquationLines) -> Blocks:
    """The same blocks with what a sharding takes in each, in words, and what that costs."""
    problem = sharding.problem
    roles = find_roles(sharding.graph, lines.recomputed, problem.classes)
    graph = with_module_names(sharding.graph, roles)
    factors = [strategy.factors for strategy in sharding.strategies]
    words = ParallelismLabels(
        graph, sharding.mesh, sharding.layouts, factors, roles, lines.recomputed
    )
    figures = _figures(blocks, sharding)
    occurrences: dict[int, list[Occurrence]] = defaultdict(list)
    for own in blocks.sequence:
        occurrences[own.block].append(own)

    def filled(at: int, block: Block) -> Block:
        node = graph.nodes[block.entry]
        chosen = sharding.choice[block.owner]
        layout = sharding.layouts[block.entry][1][0]
        taken = next((s for s in block.strategies if s.index == chosen), None)
        of_nodes = [sharding.choice[problem.classes[n]] for n in block.nodes]
        astray = sum(a != b for a, b in zip(of_nodes, taken.nodes, strict=True)) if taken else 0
        compute_s, communication_s, sent = figures[at]
        return replace(
            block,
            module=_pattern([graph.nodes[own.entry].module for own in occurrences[at]]),
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
            num_astray=astray if taken else len(block.nodes) - 1,
            compute_s=rounded(compute_s),
            communication_s=rounded(communication_s),
            communication_bytes=rounded(sent),
        )

    return replace(blocks, blocks=tuple(filled(at, b) for at, b in enumerate(blocks.blocks)))


def _factors(sharding: GraphSharding, block: Block, index: int) -> tuple[int, ...]:
    return sharding.problem.strategies[block.owner][index].factors


def _pattern(names: list[str]) -> str:
    """Modules of equal layers as one name."""
    if len({name_skeleton(name) for name in names}) > 1:
        return names[0]
    return name_pattern(names)


def _figures(blocks: Blocks, sharding: GraphSharding) -> list[_Figures]:
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
