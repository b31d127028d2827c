"""The best sharding for every layout of an array: from `Origin`, `PlanArray`s to `SolvedLayouts`.

The solver's problem is rebuilt (`sharding.origin`). For each layout, the arrays' nodes are
restricted to it and the rest is solved (`sharding.marginals`). Arrays of equal layers are one
decision, so an alternative moves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.inspect.find_arrays import ArrayKind, PlanArray
from autopar.ir.graph import Graph
from autopar.sharding.marginals import Marginal, min_marginals
from autopar.sharding.origin import Origin
from autopar.sharding.problem import Allowed, ShardingProblem
from autopar.sharding.solve import GraphSharding

_BUDGET_TIME_S = 20.0


@dataclass(frozen=True, eq=False)
class SolvedLayouts:
    """marginals:        the best sharding for each layout.
    graph:            that was solved.
    value:            the first array in that graph; None for a constant.
    base:             the sharding that costs are compared with.
    results:          class -> which of its results the arrays are.
    equivalent_paths: other arrays of the same classes, which move with these.
    num_arrays:       how many arrays move together.
    """

    marginals: list[Marginal]
    graph: Graph
    value: int | None
    base: GraphSharding
    results: Mapping[int, int]
    equivalent_paths: tuple[str, ...]
    num_arrays: int


def solve_layouts(origin: Origin, arrays: Sequence[PlanArray], most: int) -> SolvedLayouts:
    """`most`: how many layouts are solved; of others, a lower bound is given."""
    sharding = origin.sharding
    free_outputs = [array.index for array in arrays if _is_free_output(origin, array)]
    graph = origin.graph_with_outputs(free_outputs) if free_outputs else sharding.graph
    values = [value_in(graph, array, origin) for array in arrays]
    problem = _unconstrained(origin, graph, [v for v in values if v is not None])
    results: dict[int, int] = {}
    for value in values:
        if value is not None:
            node, result = graph.producer[value]
            results[problem.classes[node]] = result
    chosen = arrays[0].tensor.layout
    marginals = min_marginals(
        problem,
        results,
        always=(chosen,),
        known={chosen: sharding} if problem is sharding.problem else None,
        max_solved=most,
        budget_bytes=origin.budget,
        first_price=origin.price,
        solver=origin.options.solver,
        time_limit_s=origin.options.solver_time_limit_s,
        budget_time_s=_BUDGET_TIME_S,
    )
    # A graph with extra output nodes is not the plan's: its shardings are compared with its own.
    resolved = next((one.sharding for one in marginals if one.layout == chosen), None)
    base = sharding if graph is sharding.graph or resolved is None else resolved
    paths = {array.tensor.path for array in arrays}
    equivalent = [path for path in _class_paths(problem, results) if path not in paths]
    return SolvedLayouts(
        marginals=marginals,
        graph=graph,
        value=values[0],
        base=base,
        results=results,
        equivalent_paths=tuple(dict.fromkeys(equivalent)),
        num_arrays=len(paths) + len(equivalent),
    )


def value_in(graph: Graph, array: PlanArray, origin: Origin) -> int | None:
    """The array's value in a graph of the origin's step; state is known by its input. None for an
    output that is a constant."""
    match array.kind:
        case ArrayKind.INPUT:
            return graph.inputs[array.index]
        case ArrayKind.OUTPUT:
            inputs = {o: graph.inputs[i] for i, o in graph.state}
            return inputs.get(array.index, graph.outputs[array.index])
        case _:
            return list(origin.step.program.named_values())[array.index].value


def _is_free_output(origin: Origin, array: PlanArray) -> bool:
    """Whether an output's producer may be unable to give it in every layout. State can be
    resharded to its input."""
    state = {o for _, o in origin.step.state}
    return array.kind is ArrayKind.OUTPUT and array.index not in state


def _unconstrained(origin: Origin, graph: Graph, values: Sequence[int]) -> ShardingProblem:
    """The solver's problem without what the user asks of these values, and of the values of equal
    layers that are tied to them."""
    allowed, keep = origin.solver_constraints(graph)
    released = {*values, *_tied_values(origin, graph, values, allowed)}
    free = {value: layouts for value, layouts in allowed.items() if value not in released}
    problem = origin.sharding.problem
    is_same = graph is origin.sharding.graph and len(free) == len(allowed)
    return problem if is_same and origin.choice is not None else origin.problem(graph, free, keep)


def _tied_values(
    origin: Origin, graph: Graph, values: Sequence[int], allowed: Allowed
) -> list[int]:
    """Constrained values of the same classes."""
    if not any(v in allowed for v in values):
        return []
    classes = origin.problem_classes(graph)
    tied = {(classes[node], result) for node, result in (graph.producer[v] for v in values)}
    return [
        value
        for value, (node, result) in graph.producer.items()
        if value in allowed and (classes[node], result) in tied
    ]


def _class_paths(problem: ShardingProblem, results: Mapping[int, int]) -> list[str]:
    graph = problem.graph
    paths = (
        graph.values[node.results[results[owner]]].path
        for node, owner in zip(graph.nodes, problem.classes, strict=True)
        if owner in results
    )
    return [path for path in paths if path]
