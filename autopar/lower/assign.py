"""From layouts of graph nodes to layouts on the program: `ProgramSharding`.

Program and graph use the same numbers for values, so this walk follows the program and looks up
each equation's node. A value has the layout that its producer was given; an operand that is needed
in another one gets a chain of layouts to pass through, the cheapest sequence of collectives. A
value that a loop only reads is resharded in front of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopar import _jax
from autopar.cost.reshard import reshard_table
from autopar.ir.graph import OUTPUT, Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.program import Equation, Operand, Program
from autopar.ir.program_sharding import (
    Chain,
    EquationSharding,
    ProgramSharding,
    Refetch,
    UnreducedAxes,
)
from autopar.ir.spec import PARTIAL, WHOLE, Layout, NodeLayouts, is_slice, num_shards
from autopar.lower.unreduced import partial_axes
from autopar.tracer.regions import BACKWARD


def assign_layouts(
    program: Program,
    graph: Graph,
    layouts: Sequence[NodeLayouts],
    mesh: LogicalMesh,
    *,
    refetch: bool = False,
) -> ProgramSharding:
    """`layouts[n]`: (operand layouts, result layouts) of node n. With `refetch`, the backward pass
    repeats the gathers of the forward pass."""
    return _Assigner(graph, layouts, mesh, refetch).top(program)


class _Assigner:
    def __init__(
        self, graph: Graph, layouts: Sequence[NodeLayouts], mesh: LogicalMesh, refetch: bool
    ) -> None:
        self.graph = graph
        self.layouts = layouts
        self.mesh = mesh
        self.refetch = refetch
        self.made_backward: dict[int, None] = {}  # values of the program or body, in order
        self.current: dict[int, Layout] = {}  # program value -> its layout
        self.nodes_of_equation: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            if node.equation is not None and node.kind is NodeKind.OP:
                self.nodes_of_equation.setdefault(node.equation, []).append(index)
        self.num_equations = 0  # seen so far; bodies are numbered right after their loop

    # -- layouts

    def result_layout(self, value: int) -> Layout:
        """The layout in which the graph makes a value."""
        node, position = self.graph.producer[value]
        return self.layouts[node][1][position]

    def place(self, values: Sequence[int]) -> None:
        """Give values made here the layouts of their producers in the graph."""
        for value in values:
            self.current[value] = self.result_layout(value)

    def chain(self, operand: Operand, target: Layout, via: int | None = None) -> Chain:
        """The layouts that take an operand to its target; `via` is the graph value that the
        consumer reads, which may be a shared use of an input."""
        if not isinstance(operand, int):
            return ()
        here = self.current[operand]
        if here == target and (via is None or via == operand):
            return ()
        steps: list[Layout] = []
        if via is not None and via != operand:
            producer = self.graph.nodes[self.graph.producer[via][0]]
            if producer.kind is NodeKind.USE:
                shared = self.result_layout(via)
                steps += self.path(operand, here, shared)
                here = shared
        steps += self.path(operand, here, target)
        return tuple(s for s in steps if self.is_explicit(operand, s))

    def is_explicit(self, value: int, layout: Layout) -> bool:
        """Partial sums are left to the compiler, except those that a loop adds up."""
        return PARTIAL not in layout or value in self.graph.unfinished

    def path(self, value: int, source: Layout, target: Layout) -> list[Layout]:
        if source == target:
            return []
        info = self.graph.values[value]
        partial = PARTIAL in source or PARTIAL in target
        table = reshard_table(self.mesh, info.shape, float(info.num_bytes), partial)
        steps = table.path(source, target)
        shards = [num_shards(s, self.mesh.shape) for s in (source, *steps)]
        # The compiler does slices alone, or gathers alone, in one step.
        only_slices = all(b > a for a, b in pairwise(shards))
        only_gathers = all(b < a for a, b in pairwise(shards))
        return [target] if only_slices or only_gathers else steps

    # -- programs

    def top(self, program: Program) -> ProgramSharding:
        self.place(program.inputs)
        inputs = tuple(self.current[v] for v in program.inputs)
        equations = self.equations(program)
        state = {o: self.result_layout(program.inputs[i]) for i, o in self.graph.state}
        outputs = []
        for index, out in enumerate(program.outputs):
            if not isinstance(out, int):
                outputs.append(())
                continue
            value = self.graph.outputs[index]
            assert value is not None
            node = self.graph.nodes[self.graph.producer[value][0]]
            if node.name == OUTPUT:
                outputs.append(self.chain(out, self.result_layout(value), node.operands[0]))
                continue
            complete = tuple(max(entry, WHOLE) for entry in self.current[out])
            outputs.append(self.chain(out, state.get(index, complete)))
        return ProgramSharding(inputs, equations, tuple(outputs))

    def equations(self, program: Program) -> tuple[EquationSharding, ...]:
        self.place([value for value, _ in program.captured])
        return tuple(self.equation(e) for e in program.equations)

    def equation(self, equation: Equation) -> EquationSharding:
        index = self.num_equations
        self.num_equations += 1
        if equation.name == "scan":
            return self.scan(equation)
        if equation.name == "while":
            return self.while_loop(equation)
        if equation.name == "cond":
            return self.cond(equation)
        nodes = self.nodes_of_equation.get(index)
        if nodes is None:  # no results: an effect such as a debug print
            return EquationSharding(((),) * len(equation.operands), ())
        needed = iter(
            pair
            for node in nodes
            for pair in zip(self.graph.nodes[node].operands, self.layouts[node][0], strict=True)
        )
        chains: list[Chain] = []
        refetched: list[Refetch] = []
        backward = self.graph.nodes[nodes[0]].region == BACKWARD
        for position, operand in enumerate(equation.operands):
            if not isinstance(operand, int):
                chains.append(())
                continue
            via, layout = next(needed)
            chains.append(self.chain(operand, layout, via))
            if self.refetch and backward:
                refetched += self.refetch_operand(equation, position, via, chains[-1])
        self.place(equation.results)
        if backward:
            self.made_backward.update(dict.fromkeys(equation.results))
        return EquationSharding(
            tuple(chains),
            tuple(map(self.result_chain, equation.results)),
            local=self.shard_layouts(equation, nodes[0]),
            refetched=tuple(refetched),
            lanes=self.lanes(equation, nodes),
        )

    def shard_layouts(self, equation: Equation, node: int) -> tuple[tuple[Layout, ...], ...]:
        """The layouts of an operator that is bound to shards, if it is split at all."""
        operands, results = self.layouts[node]
        if not self.graph.nodes[node].rule.local or all(
            max(layout, default=WHOLE) < 0 for layout in (*operands, *results)
        ):
            return ()
        remaining, whole = iter(operands), (WHOLE,) * len(self.mesh.shape)
        operands = tuple(
            next(remaining) if isinstance(o, int) else whole for o in equation.operands
        )
        return operands, results

    def refetch_operand(
        self, equation: Equation, position: int, via: int, chain: Chain
    ) -> list[Refetch]:
        """How the backward pass fetches an operand from the forward pass, or a parameter, again:
        not at all if nothing is sent for it."""
        operand = equation.operands[position]
        assert isinstance(operand, int)
        if self.graph.nodes[self.graph.producer[via][0]].region == BACKWARD:
            return []
        shared = self.result_layout(via)
        num_shared = chain.index(shared) + 1 if shared in chain else 0
        layouts = (
            chain[num_shared - 1] if num_shared else self.current[operand],
            *chain[num_shared:],
        )
        if all(is_slice(a, b) for a, b in pairwise(layouts)):
            return []
        beside = [v for v in equation.inputs if v in self.made_backward]
        after = (beside or [next(reversed(self.made_backward), None)])[-1]
        return [] if after is None else [Refetch(position, num_shared, after)]

    def lanes(self, equation: Equation, nodes: Sequence[int]) -> UnreducedAxes | None:
        """The axes of partial sums that a loop adds up: see `UnreducedAxes`. Lanes of operands stay
        until the op is bound, even those that its result is then summed over."""
        if self.graph.unfinished.isdisjoint((equation.results[0], *equation.inputs)):
            return None
        layouts = iter(layout for node in nodes for layout in self.layouts[node][0])
        operands = [next(layouts) if isinstance(o, int) else None for o in equation.operands]
        axes = set(self.unreduced_axes(equation.results[0]))
        for operand, layout in zip(equation.operands, operands, strict=True):
            if isinstance(operand, int) and operand in self.graph.unfinished:
                axes.update(partial_axes(layout))
        return UnreducedAxes(tuple(sorted(axes)), tuple(operands)) if axes else None

    def unreduced_axes(self, value: int) -> tuple[int, ...]:
        """Mesh axes along which a value stays a partial sum."""
        return partial_axes(self.current[value]) if value in self.graph.unfinished else ()

    def result_chain(self, value: int) -> Chain:
        """Layouts that a new result is taken through. If partial sums are reduced, every step is
        spelled out: given only the last one, the partitioner may compute the op in another way. It
        may even compute it wrongly: a product with one axis on its batch and the other on a
        contracted dimension, with a result that has the second axis on the batch and the first
        elsewhere (JAX 0.10.2 and 0.12)."""
        target = self.current[value]
        node = self.graph.nodes[self.graph.producer[value][0]]
        if node.kind is NodeKind.FINISH:
            raw = self.result_layout(node.operands[0])
            lanes = self.unreduced_axes(value)
            steps = tuple(s for s in self.path(value, raw, target) if partial_axes(s) == lanes)
            if steps:
                maker = self.graph.nodes[self.graph.producer[node.operands[0]][0]]
                return (*_as_gathered(maker, raw, steps[0]), *steps)
        return (target,) if self.is_explicit(value, target) else ()

    # -- loops

    def pass_into_loop(self, operand: Operand, value: int) -> Chain:
        """The chain of an operand that a loop only reads: it enters in its layout inside."""
        if not isinstance(operand, int) or not self.graph.values[value].shape:
            self.current[value] = (WHOLE,) * len(self.mesh.shape)
            return ()
        self.place([value])
        node = self.graph.nodes[self.graph.producer[value][0]]
        return self.chain(operand, self.current[value], node.operands[0])

    def body(self, program: Program, targets: Sequence[Layout | None]) -> ProgramSharding:
        """A body whose inputs have layouts already and whose outputs go to the targets (None: stay
        as they are)."""
        inputs = tuple(self.current[v] for v in program.inputs)
        outer, self.made_backward = self.made_backward, {}
        equations = self.equations(program)
        self.made_backward = outer
        outputs = [
            () if target is None else self.chain(out, target)
            for out, target in zip(program.outputs, targets, strict=True)
        ]
        return ProgramSharding(inputs, equations, tuple(outputs))

    def scan(self, equation: Equation) -> EquationSharding:
        (body,) = equation.bodies
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        first_x = num_consts + num_carry
        chains: list[Chain] = []
        for position, (operand, value) in enumerate(
            zip(equation.operands, body.inputs, strict=True)
        ):
            if position < num_consts:
                chains.append(self.pass_into_loop(operand, value))
                continue
            self.place([value])
            if self.unreduced_axes(value):  # starts at zero, whatever the layout
                chains.append(())
            elif position < first_x or not isinstance(operand, int):
                chains.append(self.chain(operand, self.current[value]))
            else:  # the stack has a layout outside; the body takes slices of it
                node = self.graph.producer[value][0]
                stacked, via = self.layouts[node][0][0], self.graph.nodes[node].operands[0]
                chains.append(self.chain(operand, stacked, via))
        targets = [self.current[v] for v in body.inputs[num_consts:first_x]]
        for result in equation.results[num_carry:]:
            node = self.graph.producer[result][0]
            needed, made = self.layouts[node]
            targets.append(needed[0] if needed else made[0])
        inside = self.body(body, targets)
        results = []
        for result, carried in zip(equation.results, targets[:num_carry], strict=False):
            results.append(self.after_loop(result, carried))
        for result in equation.results[num_carry:]:
            self.place([result])
            results.append((self.current[result],))
        return EquationSharding(tuple(chains), tuple(results), (inside,))

    def after_loop(self, result: int, carried: Layout) -> Chain:
        """The layouts of a carry after its loop, where its sum is reduced."""
        self.current[result] = carried
        if result not in self.graph.producer:
            return (carried,)
        self.place([result])
        return (carried, *self.path(result, carried, self.current[result]))

    def while_loop(self, equation: Equation) -> EquationSharding:
        condition, body = equation.bodies
        cond_consts = equation.params["cond_nconsts"]
        body_consts = equation.params["body_nconsts"]
        const_inputs = (*condition.inputs[:cond_consts], *body.inputs[:body_consts])
        operands = equation.operands
        chains = [
            self.pass_into_loop(operand, value)
            for operand, value in zip(operands[: len(const_inputs)], const_inputs, strict=True)
        ]
        carries = body.inputs[body_consts:]
        self.place(carries)
        layouts = [self.current[c] for c in carries]
        for operand, layout in zip(operands[len(const_inputs) :], layouts, strict=True):
            chains.append(self.chain(operand, layout))
        self.current.update(zip(condition.inputs[cond_consts:], layouts, strict=True))
        programs = (self.body(condition, [None]), self.body(body, layouts))
        self.current.update(zip(equation.results, layouts, strict=True))
        return EquationSharding(tuple(chains), tuple((r,) for r in layouts), programs)

    def cond(self, equation: Equation) -> EquationSharding:
        targets = [self.result_layout(r) for r in equation.results]
        programs = []
        for branch in equation.bodies:
            # Operands enter unchanged: only the branch that runs pays for another layout.
            for operand, value in zip(equation.operands[1:], branch.inputs, strict=True):
                if isinstance(operand, int):
                    self.current[value] = self.current[operand]
                else:
                    self.place([value])
            programs.append(self.body(branch, targets))
        self.place(equation.results)
        chains = ((),) * len(equation.operands)
        return EquationSharding(chains, tuple((r,) for r in targets), tuple(programs))


def _as_gathered(maker: Node, made: Layout, wanted: Layout) -> Chain:
    """The layout in which a gather makes its result, if that comes before the wanted one. XLA of
    JAX 0.11 aborts the process (`spmd_partitioner_util.cc`, a failed check) if the gather is split
    in one way, and a dimension of its result is to be split along several axes."""
    complete = tuple(max(entry, WHOLE) for entry in made)
    is_split = any(entry >= 0 for entry in complete)
    split = [entry for entry in wanted if entry >= 0]
    aborts = is_split and complete != wanted and len(split) > len(set(split))
    return (complete,) if maker.name == "gather" and aborts else ()
