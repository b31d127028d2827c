"""From strategies of graph nodes to layouts on the program: which operand goes where, and when.

The program and the graph number values alike, so this walk follows the program and looks up each
equation's node. The layout of a value is the one its producer was given; an operand that is needed
otherwise gets a chain of layouts to pass through, the cheapest sequence of collectives.
"""

from __future__ import annotations

from autopar import _jax
from autopar.cost.reshard import reshard_table
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Chain, EquationSharding, ProgramSharding
from autopar.ir.spec import PARTIAL, Layout, num_shards


def assign_layouts(
    program: object,
    graph: Graph,
    layouts: tuple[tuple[tuple[Layout, ...], tuple[Layout, ...]], ...],
    mesh: LogicalMesh,
    replicate_keys: bool = True,
) -> ProgramSharding:
    """`layouts[n]` are (operand layouts, result layouts) of node n."""
    return _Assigner(graph, layouts, mesh).top(program)


class _Assigner:
    def __init__(self, graph: Graph, layouts: tuple, mesh: LogicalMesh) -> None:
        self.graph = graph
        self.layouts = layouts
        self.mesh = mesh
        self.current: dict[int, Layout] = {}  # program value -> layout it lies in now
        self.node_of_equation = {
            n.equation: i
            for i, n in enumerate(graph.nodes)
            if n.equation is not None and n.kind is NodeKind.OP
        }
        self.counter = 0

    def result_layout(self, value: int) -> Layout:
        """The layout that the graph gives a value where it is made."""
        node, position = self.graph.producer[value]
        return self.layouts[node][1][position]

    def chain(self, value: int, target: Layout, via: int | None = None) -> Chain:
        """Layouts to take a program value through, to its target; `via` is the graph value that
        the consumer reads, which may be a shared use of an input."""
        here = self.current[value]
        steps: list[Layout] = []
        if via is not None:
            producer = self.graph.nodes[self.graph.producer[via][0]]
            use = self.result_layout(via)
            if producer.kind is NodeKind.USE and use != here:
                steps += self.path(value, here, use)
                here = use
        steps += self.path(value, here, target)
        return tuple(s for s in steps if PARTIAL not in s)

    def path(self, value: int, source: Layout, target: Layout) -> list[Layout]:
        if source == target:
            return []
        info = self.graph.values[value]
        partial = PARTIAL in source or PARTIAL in target
        table = reshard_table(self.mesh, info.shape, float(info.num_bytes), partial)
        steps = table.path(source, target)
        shards = [num_shards(s, self.mesh.shape) for s in (source, *steps)]
        only_slices = all(b > a for a, b in zip(shards, shards[1:], strict=False))
        only_gathers = all(b < a for a, b in zip(shards, shards[1:], strict=False))
        return [target] if only_slices or only_gathers else steps

    def top(self, program) -> ProgramSharding:
        for value in program.inputs:
            self.current[value] = self.result_layout(value)
        inputs = tuple(self.current[v] for v in program.inputs)
        for value, _ in program.captured:
            self.current[value] = self.result_layout(value)
        equations = self.equations(program)
        target = {o: self.result_layout(program.inputs[i]) for i, o in self.graph.state}
        outputs = []
        for index, out in enumerate(program.outputs):
            if not isinstance(out, int):
                outputs.append(())
                continue
            here = self.current[out]
            whole = tuple(-1 if e == PARTIAL else e for e in here)
            outputs.append(self.chain(out, target.get(index, whole)))
        return ProgramSharding(inputs, equations, tuple(outputs))

    def equations(self, program) -> tuple[EquationSharding, ...]:
        for value, _ in program.captured:
            self.current.setdefault(value, self.result_layout(value))
        return tuple(self.equation(e) for e in program.equations)

    def equation(self, equation) -> EquationSharding:
        index = self.counter
        self.counter += 1
        if equation.name == "scan":
            return self.scan(equation)
        if equation.name == "while":
            return self.while_loop(equation)
        if equation.name == "cond":
            return self.cond(equation)
        node_index = self.node_of_equation.get(index)
        if node_index is None:  # no results: an effect such as a debug print
            return EquationSharding(((),) * len(equation.operands), ())
        node = self.graph.nodes[node_index]
        needed = iter(zip(node.operands, self.layouts[node_index][0], strict=True))
        chains: list[Chain] = []
        for operand in equation.operands:
            if not isinstance(operand, int):
                chains.append(())
                continue
            via, layout = next(needed)
            chains.append(self.chain(operand, layout, via))
        results = []
        for value in equation.results:
            layout = self.result_layout(value)
            self.current[value] = layout
            results.append(None if PARTIAL in layout else layout)
        return EquationSharding(tuple(chains), tuple(results))

    def pass_into(self, operand, value: int) -> Chain:
        """A loop-invariant operand: the body sees it in the layout of its shared use."""
        if not isinstance(operand, int):
            self.current[value] = self.result_layout(value)
            return ()
        self.current[value] = self.current[operand]
        return ()

    def scan(self, equation) -> EquationSharding:
        (body,) = equation.bodies
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        first_x = num_consts + num_carry
        chains: list[Chain] = []
        for position, (operand, value) in enumerate(
            zip(equation.operands, body.inputs, strict=True)
        ):
            if position < num_consts:
                chains.append(self.pass_into(operand, value))
                continue
            self.current[value] = self.result_layout(value)
            if not isinstance(operand, int):
                chains.append(())
            elif position < first_x:
                chains.append(self.chain(operand, self.current[value]))
            else:
                node = self.graph.producer[value][0]
                via = self.graph.nodes[node].operands[0]
                chains.append(self.chain(operand, self.layouts[node][0][0], via))
        inputs = tuple(
            None if p < num_consts else self.current[v] for p, v in enumerate(body.inputs)
        )
        equations = self.equations(body)
        outputs: list[Chain] = []
        results: list[Layout | None] = []
        for position, (out, result) in enumerate(zip(body.outputs, equation.results, strict=True)):
            if position < num_carry:
                layout = self.result_layout(body.inputs[num_consts + position])
                needed = layout
            else:
                node = self.graph.producer[result][0]
                layout = self.result_layout(result)
                needed = self.layouts[node][0][0] if self.layouts[node][0] else layout
            outputs.append(self.chain(out, needed) if isinstance(out, int) else ())
            self.current[result] = layout
            results.append(layout)
        return EquationSharding(
            tuple(chains), tuple(results), (ProgramSharding(inputs, equations, tuple(outputs)),)
        )

    def while_loop(self, equation) -> EquationSharding:
        condition, body = equation.bodies
        cond_consts = equation.params["cond_nconsts"]
        body_consts = equation.params["body_nconsts"]
        chains = [
            self.pass_into(o, v)
            for o, v in zip(
                equation.operands[: cond_consts + body_consts],
                (*condition.inputs[:cond_consts], *body.inputs[:body_consts]),
                strict=True,
            )
        ]
        carries = body.inputs[body_consts:]
        for operand, carry in zip(
            equation.operands[cond_consts + body_consts :], carries, strict=True
        ):
            self.current[carry] = self.result_layout(carry)
            chains.append(
                self.chain(operand, self.current[carry]) if isinstance(operand, int) else ()
            )
        for value, carry in zip(condition.inputs[cond_consts:], carries, strict=True):
            self.current[value] = self.current[carry]
        programs = []
        for program, num_consts in ((condition, cond_consts), (body, body_consts)):
            inputs = tuple(
                None if p < num_consts else self.current[v] for p, v in enumerate(program.inputs)
            )
            equations = self.equations(program)
            outputs: tuple[Chain, ...] = ((),) * len(program.outputs)
            if program is body:
                outputs = tuple(
                    self.chain(o, self.current[c]) if isinstance(o, int) else ()
                    for o, c in zip(program.outputs, carries, strict=True)
                )
            programs.append(ProgramSharding(inputs, equations, outputs))
        results = []
        for carry, result in zip(carries, equation.results, strict=True):
            self.current[result] = self.current[carry]
            results.append(self.current[carry])
        return EquationSharding(tuple(chains), tuple(results), tuple(programs))

    def cond(self, equation) -> EquationSharding:
        programs = []
        for branch in equation.bodies:
            for operand, value in zip(equation.operands[1:], branch.inputs, strict=True):
                self.pass_into(operand, value)
            equations = self.equations(branch)
            outputs = tuple(
                self.chain(o, self.result_layout(r)) if isinstance(o, int) else ()
                for o, r in zip(branch.outputs, equation.results, strict=True)
            )
            programs.append(ProgramSharding((None,) * len(branch.inputs), equations, outputs))
        results = []
        for result in equation.results:
            self.current[result] = self.result_layout(result)
            results.append(self.current[result])
        return EquationSharding(
            ((),) * len(equation.operands), tuple(results), tuple(programs)
        )
