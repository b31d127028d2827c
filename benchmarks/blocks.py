"""Parallel blocks: how many there are, and solve time with and without contraction.

    python -m benchmarks.blocks [--repeats 3] [--only NAME] [--json FILE]

Builds a step's graph once. Then it times fold → costs → reductions → solution from cleared caches,
with ops as nodes of the integer programme (`contract=False`) and contracted by bounds, interleaved;
times are processor seconds, the smallest of the repeats. Both must have the same optimum. `follow`
is the optimum if every op had to follow its block's entry, over the real one: it shows why blocks
cannot simply be the nodes.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from autopar.cost.reshard import reshard_table
from autopar.ir.blocks import Blocks
from autopar.ir.graph import Graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.sharding.blocks import find_blocks
from autopar.sharding.ilp import solve_ilp
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, reduce_problem
from autopar.sharding.solve import GraphSharding, solve_graph
from autopar.sharding.strategies import enumerate_strategies
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from benchmarks.script import read_rows, script_parser, write_json
from examples.models import build

ONE_HOST, EIGHT_HOSTS = ClusterSpec(1, 8, "h100-sxm"), ClusterSpec(8, 8, "h100-sxm")


def rows() -> dict[str, tuple[str, dict[str, Any], int, ClusterSpec, tuple[int, ...], bool]]:
    """name -> (model, overrides, batch, cluster, mesh shape, whether layers are folded)"""
    large = {
        f"{name}, (8, 8)": (model, config, 64, EIGHT_HOSTS, (8, 8), True)
        for name, model, config in (
            ("GPT-2.6B", "gpt-2.6b", {}),
            ("MoE-10B", "moe-10b", {}),
            ("Llama3-8B", "llama3-8b", {"seq_len": 2048}),
        )
    }
    small = {
        f"{model}, (2, 4)": (model, {}, 8, ONE_HOST, (2, 4), True)
        for model in ("gpt-tiny", "moe-tiny", "llama-tiny", "bert-tiny", "wresnet-tiny")
    }
    unfolded = {
        "GPT-1.3B of 4 layers, not folded, (2, 4)": (
            "gpt-1.3b", {"num_layers": 4}, 64, ONE_HOST, (2, 4), False,
        )
    }  # fmt: skip
    return {**large, **small, **unfolded}


def solved(
    graph: Graph, mesh: LogicalMesh, fold: bool, contract: bool
) -> tuple[float, GraphSharding]:
    reshard_table.cache_clear()
    enumerate_strategies.cache_clear()
    gc.collect()
    gc.disable()  # as the compiler does
    started = time.process_time()
    sharding = solve_graph(graph, mesh, fold=fold, contract=contract, time_limit_s=300.0)
    seconds = time.process_time() - started
    gc.enable()
    return seconds, sharding


def following(problem: ShardingProblem, blocks: Blocks) -> PairwiseProblem:
    """The problem in which blocks are the nodes and every op follows its entry."""
    owner: dict[int, int] = {}
    taken: dict[int, np.ndarray] = {}  # class -> its strategy per strategy of the entry
    for one, node in problem.representative.items():
        occurrence = blocks.sequence[blocks.block_of_node[node]]
        block = blocks.blocks[occurrence.block]
        place = occurrence.nodes.index(node)
        owner[one] = block.owner
        strategies = np.full(len(problem.strategies[block.owner]), -1)
        for strategy in block.strategies:
            strategies[strategy.index] = strategy.nodes[place]
        taken[one] = strategies
    costs: dict[int, np.ndarray] = {}
    for one, strategies in taken.items():
        cost = np.where(strategies >= 0, problem.pairwise.costs[one][strategies], FORBIDDEN)
        costs[owner[one]] = costs.get(owner[one], 0.0) + cost
    contracted = PairwiseProblem(costs)
    for u, row in problem.pairwise.edges.items():
        for v, matrix in row.items():
            if u < v:
                contracted.add_edge(owner[u], owner[v], matrix[np.ix_(taken[u], taken[v])])
    return contracted


def measure_row(name: str, repeats: int) -> dict[str, Any]:
    model, config, batch, cluster, shape, fold = rows()[name]
    example = build(model, **config)
    step = trace_step(example.train_step, (example.abstract_state(), example.abstract_batch(batch)))
    graph, mesh = build_graph(step), mesh_of_cluster(cluster, shape)
    best: dict[bool, tuple[float, GraphSharding]] = {}
    for _ in range(repeats):
        for contract in (False, True):
            found = solved(graph, mesh, fold, contract)
            if contract not in best or found[0] < best[contract][0]:
                best[contract] = found
    (ops_s, ops), (contracted_s, contracted) = best[False], best[True]
    difference = abs(contracted.objective - ops.objective) / ops.objective
    assert difference < 1e-9, (name, ops.objective, contracted.objective)
    started = time.process_time()
    blocks = find_blocks(ops.problem)
    blocks_s = time.process_time() - started
    reduction = reduce_problem(following(ops.problem, blocks))
    follow = solve_ilp(reduction.problem).objective / ops.objective
    solver = [sum(s.stats.seconds[k] for k in ("reduce", "solve")) for s in (ops, contracted)]
    return {
        "name": name,
        "repeats": repeats,
        "mesh": shape,
        "ops": len(graph.nodes),
        "decisions": ops.stats.num_classes,
        "blocks": len(blocks.sequence),
        "kinds of blocks": len(blocks.blocks),
        "segments": [[len(s.blocks), s.count] for s in blocks.segments],
        "find_blocks_s": blocks_s,
        "ops_s": ops_s,
        "contracted_s": contracted_s,
        "ratio": contracted_s / ops_s,
        "solver_wall_s": solver,  # reductions and solution only, by the clock
        "objective": ops.objective,
        "relative_difference": difference,
        "same_choice": contracted.choice == ops.choice,
        "gap": contracted.gap,
        "follow": follow,
        "seconds": {
            "ops": {k: round(v, 3) for k, v in ops.stats.seconds.items()},
            "contracted": {k: round(v, 3) for k, v in contracted.stats.seconds.items()},
        },
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=rows())
    arguments = parser.parse_args()
    for name in rows():
        if arguments.only not in (None, name):
            continue
        row = measure_row(name, arguments.repeats)
        print(
            f"{name:42s} {row['ops']:6d} ops {row['blocks']:5d} blocks of "
            f"{row['kinds of blocks']:3d} kinds; ops as nodes {row['ops_s']:6.2f} s, contracted "
            f"{row['contracted_s']:6.2f} s, ratio {row['ratio']:.2f}; same choice "
            f"{row['same_choice']}; if all follow {row['follow']:.3f}",
            flush=True,
        )
        write_row(arguments.json, row)


def write_row(path: str | None, row: dict[str, Any]) -> None:
    """Adds the row to the file, or replaces it there."""
    by_name = {own["name"]: own for own in (*(read_rows(path) or ()), row)}
    document = {
        "command": "python -m benchmarks.blocks",
        "jax": jax.__version__,
        "cores": os.cpu_count(),
        "rows": [by_name[name] for name in rows() if name in by_name],
    }
    write_json(path, document)


if __name__ == "__main__":
    main()
