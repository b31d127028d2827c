"""Why is this array sharded so? From a plan and a path to its neighbours and alternatives: `Why`.

The problem that the solver had is built again (`origin`). For every layout that the array can have,
the best whole plan with it is found by restricting the array's own node and solving what is left
(`sharding.marginals`). Arrays of equal layers are one decision, so an alternative moves them all.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf

from autopar.cost.halo import halo_steps
from autopar.cost.report import Step, describe_step, edge_weight
from autopar.cost.reshard import DEFERRED_ALPHA_SHARE, reshard_table
from autopar.errors import ArgumentError, PlanError
from autopar.ir.graph import OUTPUT, Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.spec import PARTIAL, WHOLE, Layout, spec_to_text, to_partition_spec
from autopar.ir.why import Alternative, Neighbour, Why
from autopar.progress import Progress, logged
from autopar.sharding.layout_constraints import Request, matching_paths
from autopar.sharding.marginals import Marginal, Places, min_marginals
from autopar.sharding.origin import Origin
from autopar.sharding.problem import Allowed
from autopar.sharding.solve import GraphSharding

MOST_ALTERNATIVES = 12
_BUDGET_TIME_S = 20.0
_THERE = "· "  # before readers of what a neighbour hands on
_PASSED_ON = ("convert_element_type", "copy", "constrain")


@dataclass(frozen=True)
class _Found:
    """An array that a path stands for: "input", "output" or "named value" and its number there."""

    kind: str
    index: int
    tensor: Tensor


def why(plan: ParallelPlan, path: str, *, most: int = MOST_ALTERNATIVES) -> Why:
    """`path`: of an input, an output or a named value, or a pattern for arrays that are alike."""
    started = time.perf_counter()
    if not isinstance(path, str) or not path:
        raise ArgumentError(
            f"explain({path!r}): needs the path of an input or output, such as "
            f"{plan.inputs[0].path!r}, or a name given by autopar.constrain."
        )
    found = find_arrays(plan, path)
    stage, own, notes = None, plan, ()
    if plan.is_pipeline:
        stages = sorted({f.tensor.stages[0] for f in found})
        stage = stages[0]
        if len(stages) > 1:
            others = f"Stage {stages[1]} holds" if len(stages) == 2 else "Other stages hold"
            notes = (f"{others} arrays of this name too; this is about stage {stage}.",)
        here = {f.tensor.path for f in found if f.tensor.stages[0] == stage}
        own_plan = plan.stages[stage].plan
        assert own_plan is not None
        own = own_plan
        found = _first_of_each([f for p in here for f in find_arrays(own, p, exact=True)])
    _check_alike(path, found)
    with Progress(f"explaining {path}"), logged(f"explaining {path}"):
        told = _told(own, found, most)
    reason = next((r for f in found if (r := _reason(own, f.tensor.path))), "")
    return replace(
        told,
        stage=stage,
        reason=reason,
        notes=(*notes, *told.notes),
        seconds=time.perf_counter() - started,
    )


def find_arrays(plan: ParallelPlan, path: str, *, exact: bool = False) -> list[_Found]:
    """The arrays that a path or pattern stands for; those that have this very path come first."""
    groups = (("input", plan.inputs), ("output", plan.outputs), ("named value", plan.named))
    every = [
        _Found(kind, index, tensor)
        for kind, tensors in groups
        for index, tensor in enumerate(tensors)
    ]
    same = [f for f in every if f.tensor.path == path]
    if same or exact:
        return same
    paths = [f.tensor.path for f in every]
    found = [every[i] for i in matching_paths(paths, path)]
    if found:
        return _first_of_each(found)
    near = get_close_matches(path, dict.fromkeys(paths), n=5, cutoff=0.3) or paths[:5]
    raise ArgumentError(
        f"explain({path!r}): matches no input, output or named value of {plan.name}. Near it are: "
        f"{', '.join(near)}. In patterns '*' stands for any text and '?' for any one character."
    )


def _first_of_each(found: Sequence[_Found]) -> list[_Found]:
    first: dict[str, _Found] = {}
    for f in found:
        first.setdefault(f.tensor.path, f)
    return list(first.values())


def _check_alike(path: str, found: Sequence[_Found]) -> None:
    first = found[0].tensor
    for other in (f.tensor for f in found[1:]):
        if (other.shape, other.layout) != (first.shape, first.layout):
            raise ArgumentError(
                f"explain({path!r}): stands for {len(found)} arrays that are not alike, such as "
                f"{first.path} {first.shape} and {other.path} {other.shape}. Give the path of one, "
                "or a pattern for arrays of one shape and layout."
            )


def _reason(plan: ParallelPlan, path: str) -> str:
    if plan.details is None:
        return ""
    for own in plan.details.parallelism:
        if own.path == path:
            words = ", ".join(f"{axis}: {word}" for axis, word in own.words)
            return f"{words} ({own.reason})" if own.reason else words
    return ""


# -- on one mesh


def _told(plan: ParallelPlan, found: Sequence[_Found], most: int) -> Why:
    first = found[0]
    tensor = first.tensor
    names = plan.axis_names
    is_timed = plan.device != "communication only"
    role = f" ({tensor.role})" if tensor.role else ""
    whole = Why(
        paths=tuple(f.tensor.path for f in found),
        alike=(),
        kind=first.kind + role,
        array=f"{tensor.dtype}{list(tensor.shape)}",
        spec=layout_text(tensor.layout, len(tensor.shape), names),
        words=layout_words(tensor.layout, plan.mesh_shape, names),
        mesh=", ".join(f"{n}={s}" for n, s in zip(names, plan.mesh_shape, strict=True)),
        step_s=plan.estimated_step_s,
        peak_bytes=plan.estimated_peak_bytes,
        budget_bytes=plan.memory_budget_bytes,
        is_timed=is_timed,
    )
    if plan.num_devices == 1:
        return replace(whole, notes=("There is one device, so every array is whole on it.",))
    if not tensor.shape:
        return replace(whole, notes=("It is a single number, which every device has.",))
    origin = origin_of(plan, f"explain({tensor.path!r})")
    return _Explainer(plan, origin, found, most).filled(whole)


def origin_of(plan: ParallelPlan, call: str) -> Origin:
    if isinstance(plan.origin, Origin):
        return plan.origin
    if plan.device == "communication only":
        raise PlanError(
            f"plan.{call}: needs the link costs of the mesh {plan.mesh_shape}, which a plan read "
            "from a file does not hold. Solve again with autopar.solve_sharding(…, mesh=…)."
        )
    raise without_program(plan, call)


def without_program(plan: ParallelPlan, call: str) -> PlanError:
    return PlanError(
        f"plan.{call}: needs the program that the plan of {plan.name} was made for, which a plan "
        "read from a file does not hold. Bind it to its function first: "
        "plan = autopar.parallelize(fn, method=plan).plan(*args)."
    )


class _Explainer:
    def __init__(
        self, plan: ParallelPlan, origin: Origin, found: Sequence[_Found], most: int
    ) -> None:
        self.plan, self.origin, self.found, self.most = plan, origin, found, most
        self.mesh = origin.mesh
        self._graph: Graph | None = None
        self._uses: dict[int, list[tuple[int, int]]] = {}

    def filled(self, why: Why) -> Why:
        sharding = self.origin.sharding
        first = self.value_in(sharding.graph, self.found[0])
        if first is None:
            return replace(why, notes=("The step returns a constant here.",))
        also = [f.index for f in self.found if self.needs_node(f)]
        graph = self.origin.graph_with_outputs(also) if also else sharding.graph
        values = [self.value_in(graph, f) for f in self.found]
        allowed, keep = self.origin.constraints(graph)
        free = {v: own for v, own in allowed.items() if v not in values}
        # Arrays of equal layers stay tied to these, so what is asked of all of them is left out.
        tied = self.tied(graph, [v for v in values if v is not None], allowed)
        free = {v: own for v, own in free.items() if v not in tied}
        problem = sharding.problem
        if graph is not sharding.graph or len(free) < len(allowed) or self.origin.choice is None:
            problem = self.origin.problem(graph, free, keep)
        places: dict[int, int] = {}
        for value in values:
            if value is not None:
                node, result = graph.producer[value]
                places[problem.classes[node]] = result
        budget = self.origin.budget
        chosen = self.found[0].tensor.layout
        marginals = min_marginals(
            problem,
            places,
            always=(chosen,),
            known={chosen: sharding} if problem is sharding.problem else None,
            most=self.most,
            budget_bytes=budget,
            first_price=self.origin.price,
            solver=self.origin.options.solver,
            time_limit_s=self.origin.options.solver_time_limit_s,
            budget_time_s=_BUDGET_TIME_S,
        )
        own = next((one.sharding for one in marginals if one.layout == chosen), None)
        # The graph with nodes for outputs is not the plan's: there it is compared with itself.
        base = sharding if graph is sharding.graph or own is None else own
        ours = {f.tensor.path for f in self.found}
        alike = [
            path
            for node, owner in zip(graph.nodes, problem.classes, strict=True)
            if owner in places
            and (path := graph.values[node.results[places[owner]]].path)
            and path not in ours
        ]
        notes = self.origin.notes
        if len(marginals) == 1:
            notes = (*notes, f"{self.plan.method} leaves it no other layout; with_pins can.")
        return replace(
            why,
            alike=tuple(dict.fromkeys(alike)),
            neighbours=tuple(self.neighbours(sharding, first)),
            alternatives=tuple(
                self.alternative(one, places, base, values[0], len(ours) + len(alike))
                for one in marginals
            ),
            pinned=self.pinned(),
            notes=notes,
        )

    def tied(self, graph: Graph, values: Sequence[int], allowed: Allowed) -> set[int]:
        """Values of the same classes of which the same is asked."""
        if not any(v in allowed for v in values):
            return set()
        classes = self.origin.problem_classes(graph)
        nodes = [graph.producer[v] for v in values]
        own = {(classes[node], result) for node, result in nodes}
        return {
            value
            for value, (node, result) in graph.producer.items()
            if (classes[node], result) in own and value in allowed
        }

    def needs_node(self, found: _Found) -> bool:
        """Whether an output is given by an op that may not be able to give it in any layout."""
        state = {o for _, o in self.origin.step.state}
        return found.kind == "output" and found.index not in state

    def value_in(self, graph: Graph, found: _Found) -> int | None:
        if found.kind == "input":
            return graph.inputs[found.index]
        if found.kind == "output":
            enters = {o: graph.inputs[i] for i, o in graph.state}
            return enters.get(found.index, graph.outputs[found.index])
        return list(self.origin.step.program.named_values())[found.index].value

    def pinned(self) -> str:
        asked = self.origin.asked
        requests: list[Request] = []
        for f in self.found:
            if f.kind == "input":
                requests.append(asked.inputs[f.index])
                requests += [asked.outputs[o] for i, o in self.origin.step.state if i == f.index]
            elif f.kind == "output":
                requests.append(asked.outputs[f.index])
                requests += [asked.inputs[i] for i, o in self.origin.step.state if o == f.index]
            else:
                requests.append(asked.named[f.index][1])
        texts = [
            f"{r.source} asks for {spec_to_text(r.spec)}" for r in requests if r.spec is not None
        ]
        texts += [
            f"forbid_axes forbids to split it over {', '.join(r.forbidden_axes)}"
            for r in requests
            if r.forbidden_axes
        ]
        return "; ".join(dict.fromkeys(texts))

    # -- alternatives

    def alternative(
        self, one: Marginal, places: Places, base: GraphSharding, value: int | None, count: int
    ) -> Alternative:
        """`value`: the first of the arrays, of which there are so many with those alike."""
        tensor = self.found[0].tensor
        names = self.mesh.axis_names
        told = Alternative(
            layout_text(one.layout, len(tensor.shape), names),
            layout_words(one.layout, self.mesh.shape, names),
            one.layout == tensor.layout,
        )
        sharding = one.sharding
        if sharding is None:
            return replace(told, step_s=one.lower_bound, is_bound=one.lower_bound < inf)
        pairwise, choice = sharding.problem.pairwise, sharding.choice
        own_s = sum(float(pairwise.costs[u][choice[u]]) for u in places)
        around = [] if value is None else self.neighbours(sharding, value)
        moving_s = count * sum(neighbour.seconds for neighbour in around)
        counts, sent = changed_collectives(base, sharding)
        return replace(
            told,
            own_s=own_s,
            moving_s=moving_s,
            step_s=self.plan.estimated_step_s + sharding.objective - base.objective,
            peak_bytes=sharding.memory.peak_bytes,
            fits=one.fits,
            gap=min(sharding.gap, 1.0),
            changes=tuple(sorted((kind, n) for kind, n in counts.items() if n)),
            more_bytes=sent,
        )

    # -- neighbours

    def neighbours(self, sharding: GraphSharding, value: int) -> list[Neighbour]:
        graph = sharding.graph
        maker, result = graph.producer[value]
        made_in = sharding.layouts[maker][1][result]
        found = []
        if graph.nodes[maker].kind is not NodeKind.INPUT:
            found.append(self.neighbour(sharding, "made by", maker, made_in, made_in, value, 0.0))
            found += self.before(sharding, maker)
        for o in [o for i, o in graph.state if graph.inputs[i] == value]:
            source = graph.outputs[o]
            if source is None or graph.producer[source][0] == maker:
                continue
            node, position = graph.producer[source]
            layout = sharding.layouts[node][1][position]
            role = "its next value is made by"
            found.append(self.neighbour(sharding, role, node, layout, made_in, source, 1.0))
        found += self.readers(sharding, value, "read by")
        return found

    def before(self, sharding: GraphSharding, maker: int) -> list[Neighbour]:
        """The operator whose partial sums are finished here."""
        graph = sharding.graph
        node = graph.nodes[maker]
        if node.kind is not NodeKind.FINISH:
            return []
        value = node.operands[0]
        source, result = graph.producer[value]
        layout = sharding.layouts[source][1][result]
        target = sharding.layouts[maker][0][0]
        weight = edge_weight(graph.nodes[source], node)
        role = "whose sums come from"
        return [self.neighbour(sharding, role, source, layout, target, value, weight)]

    def readers(self, sharding: GraphSharding, value: int, role: str) -> list[Neighbour]:
        """Those that read a value; behind a node that only gives it a second layout, who does."""
        graph = sharding.graph
        maker, result = graph.producer[value]
        made_in = sharding.layouts[maker][1][result]
        found = []
        for index, position in self.uses(graph).get(value, ()):
            node = graph.nodes[index]
            target = sharding.layouts[index][0][position]
            weight = edge_weight(graph.nodes[maker], node)
            found.append(
                self.neighbour(sharding, role, index, target, target, value, weight, made_in)
            )
            is_use = node.kind is NodeKind.USE and node.name != OUTPUT
            if (is_use or node.name in _PASSED_ON) and role.count(_THERE) < 3:
                found += self.readers(sharding, node.results[0], _THERE + role)
        return found

    def uses(self, graph: Graph) -> dict[int, list[tuple[int, int]]]:
        """Value -> (node, position among its operands) of everything that reads it."""
        if graph is not self._graph:
            self._graph, self._uses = graph, {}
            for index, node in enumerate(graph.nodes):
                for position, value in enumerate(node.operands):
                    self._uses.setdefault(value, []).append((index, position))
        return self._uses

    def neighbour(
        self,
        sharding: GraphSharding,
        role: str,
        index: int,
        layout: Layout,
        target: Layout,
        value: int,
        weight: float,
        source: Layout | None = None,
    ) -> Neighbour:
        """`layout` is how the node makes or reads the value, which goes from `source` (that layout,
        if None) to `target`."""
        graph, mesh = sharding.graph, self.mesh
        node, info = graph.nodes[index], graph.values[value]
        source = layout if source is None else source
        seconds, steps = 0.0, []
        if source != target and weight:
            seconds, steps = way(mesh, graph, value, source, target)
        strategy = sharding.strategies[index]
        names = mesh.axis_names

        def texts(values: Sequence[int], layouts: Sequence[Layout]) -> str:
            return ", ".join(
                layout_text(own, len(graph.values[v].shape), names)
                for v, own in zip(values, layouts, strict=True)
            )

        operands = texts(node.operands, strategy.operands)
        results = texts(node.results, strategy.results)
        return Neighbour(
            role=role,
            operator=_operator(node),
            module=node.module,
            region=node.region,
            layout=layout_text(layout, len(info.shape), names),
            strategy=f"{operands} → {results}" if operands else results,
            seconds=weight * seconds,
            steps=tuple(step_name(step, mesh) for step in steps),
            runs=node.weight,
        )


def way(
    mesh: LogicalMesh, graph: Graph, value: int, source: Layout, target: Layout
) -> tuple[float, list[Step]]:
    """(seconds, collectives) from one layout of a value to another."""
    info = graph.values[value]
    share = DEFERRED_ALPHA_SHARE if info.deferred and mesh.device is not None else 1.0
    partial = PARTIAL in source or PARTIAL in target
    table = reshard_table(mesh, info.shape, float(info.num_bytes), partial, share)
    steps, here = [], source
    for layout in table.path(source, target):
        steps.append(describe_step(mesh, here, layout, float(info.num_bytes)))
        here = layout
    return table.cost(source, target), steps


def step_name(step: Step, mesh: LogicalMesh) -> str:
    return f"{step.kind}({','.join(mesh.axis_names[a] for a in step.axes)})"


def changed_collectives(before: GraphSharding, after: GraphSharding) -> tuple[Counter[str], float]:
    """(how many more of each collective, how many more bytes a device sends) of two shardings of
    one graph, per step."""
    graph, mesh = before.graph, before.mesh
    one, two = before.strategies, after.strategies
    moved = [
        a is not b and (a.operands != b.operands or a.results != b.results)
        for a, b in zip(one, two, strict=True)
    ]
    counts: Counter[str] = Counter()
    sent = 0.0

    def add(value: int, ends: tuple[Layout, Layout], times: float) -> None:
        nonlocal sent
        if ends[0] == ends[1] or not graph.values[value].shape:
            return
        for step in way(mesh, graph, value, *ends)[1]:
            if step.kind != "slice":
                counts[step_name(step, mesh)] += int(times)
                sent += times * step.sent_bytes

    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.operands):
            u, result = graph.producer[value]
            if moved[u] or moved[index]:
                times = edge_weight(graph.nodes[u], node)
                add(value, (one[u].results[result], one[index].operands[position]), -times)
                add(value, (two[u].results[result], two[index].operands[position]), times)
        if moved[index] and node.rule.halos:
            for own, sign in ((one[index], -1), (two[index], 1)):
                for axes, _, num_bytes, shifts in halo_steps(
                    node, graph.values, mesh, own.operands
                ):
                    names = ",".join(mesh.axis_names[a] for a in axes)
                    counts[f"shift({names})"] += sign * int(node.weight) * shifts
                    sent += sign * node.weight * num_bytes
    for i, o in graph.state:
        value = graph.outputs[o]
        if value is None:
            continue
        u, result = graph.producer[value]
        v, _ = graph.producer[graph.inputs[i]]
        if u != v and (moved[u] or moved[v]):
            add(value, (one[u].results[result], one[v].results[0]), -1.0)
            add(value, (two[u].results[result], two[v].results[0]), 1.0)
    return counts, sent


def _operator(node: Node) -> str:
    return {
        NodeKind.INPUT: "the argument itself",
        NodeKind.USE: "the result itself" if node.name == OUTPUT else "all its readers together",
        NodeKind.FINISH: "the end of partial sums",
        NodeKind.MERGE: "a loop's carry",
    }.get(node.kind, node.name)


# -- layouts as text


def layout_text(layout: Layout, ndim: int, axis_names: Sequence[str]) -> str:
    """`P('x', None)`; partial sums are said so."""
    partial = [n for n, e in zip(axis_names, layout, strict=True) if e == PARTIAL]
    plain = tuple(WHOLE if e == PARTIAL else e for e in layout)
    text = spec_to_text(to_partition_spec(plain, ndim, axis_names))
    return f"{text} partial along {', '.join(partial)}" if partial else text


def layout_words(layout: Layout, mesh_shape: Sequence[int], axis_names: Sequence[str]) -> str:
    """`dimension 0 in 8 parts over x`."""
    parts = []
    for dim in sorted({e for e in layout if e >= 0}):
        axes = [a for a, e in enumerate(layout) if e == dim]
        count = 1
        for a in axes:
            count *= mesh_shape[a]
        names = " and ".join(axis_names[a] for a in axes)
        parts.append(f"dimension {dim} in {count} parts over {names}")
    copies = 1
    for size, entry in zip(mesh_shape, layout, strict=True):
        copies *= size if entry == WHOLE else 1
    if not parts:
        return f"whole on each of {copies} devices"
    return ", ".join(parts) + (f", {copies} copies" if copies > 1 else "")


__all__ = ["MOST_ALTERNATIVES", "find_arrays", "layout_text", "layout_words", "origin_of", "why"]
