"""From a `TracedStep` to the `Graph` that is sharded.

Each equation becomes a node with its Shardy rule, flops and bytes. Loops are opened: the nodes of
their bodies are weighted by the trip count and their carries tied by `MERGE` nodes, so that a scan
over layers is solved like the layers themselves. The graph has two more kinds of nodes:

- `USE` nodes after state inputs, their casts and layers cut out of them, so that a parameter
  gathered once serves forward and backward, and in front of loops, so that a value that a loop only
  reads is resharded once, not every trip;
- `FINISH` nodes after ops that can leave partial sums, where the solver chooses between all-reduce
  and reduce-scatter.

Values keep the program's numbers; values that only the graph has get numbers beyond them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any

from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.devices import INSTRUCTIONS_PER_BYTE
from autopar.ir.failures import Failure
from autopar.ir.graph import (
    Graph,
    LoopTrips,
    Node,
    NodeKind,
    Rule,
    Unruled,
    Value,
)
from autopar.ir.program import LOOPS, Equation, Operand, Program, values_in
from autopar.ir.traced_step import TracedStep
from autopar.tracer.compose import RuledEquation, replicated_rule
from autopar.tracer.costs import (
    array_passes,
    batch_factors,
    deferred_values,
    equation_flops,
    part_bytes,
    state_orders,
    touched_bytes,
)
from autopar.tracer.kernels import GraphTraffic, node_traffic
from autopar.tracer.liveness import LifeBasis, basis_of_lives, find_lives
from autopar.tracer.op_sizes import equation_work
from autopar.tracer.regions import BACKWARD, UPDATE, equation_regions, module_name, region_by_name
from autopar.tracer.rolled_layers import rolled_layers
from autopar.tracer.rules import equation_key, identity_rule, rules_of_equations
from autopar.tracer.sums import ADDITIONS, LINEAR_UNARY, loop_sums, zeros_made
from autopar.tracer.while_trips import expectations, while_trips


@dataclass(frozen=True, eq=False)
class BuiltGraph:
    """A graph, and what tells its lives where the step is run in another way."""

    graph: Graph
    basis: LifeBasis

    def run_as(self, is_stage: bool) -> Graph:
        """The graph of the step as a stage or not, which changes when values are in memory."""
        liveness = find_lives(self.basis, is_stage, self.graph.liveness)
        return replace(self.graph, liveness=liveness)


def build_graph(
    step: TracedStep,
    *,
    overlaps: bool = True,
    instructions_per_byte: float = INSTRUCTIONS_PER_BYTE,
) -> Graph:
    """`overlaps`: XLA has collectives to hide under compute, as on more than one device. That
    changes the order of its ops, and so what is in memory when. `instructions_per_byte`: of the
    device; XLA decides by it what is computed again."""
    return build(step, overlaps, instructions_per_byte).graph


def build(step: TracedStep, overlaps: bool, instructions_per_byte: float) -> BuiltGraph:
    """`build_graph`, with all that another graph of the same step shares."""
    builder = _Builder(step)
    builder.build()
    return builder.graph(overlaps, instructions_per_byte)


def build_nodes(step: TracedStep) -> tuple[Sequence[Node], Sequence[Value]]:
    """The graph's nodes and values, before all that depends on the whole graph."""
    builder = _Builder(step)
    builder.build()
    return builder.nodes, builder.values


def stablehlo_ops(step: TracedStep) -> dict[str, bool]:
    """{StableHLO op that some equation lowers to: whether it has a rule}."""
    ops: dict[str, bool] = {}
    for signature in _Builder(step).signatures:
        ruled = signature.ruled
        for name in (*ruled.op_names, *ruled.unruled_ops):
            ops[name] = ops.get(name, True) and name not in ruled.unruled_ops
    return ops


@dataclass(frozen=True)
class _Signature:
    """What equations with equal parameters and operand types share."""

    number: int
    ruled: RuledEquation
    rule: Rule  # without constant operands
    flops: float
    node: Node  # without what only one equation has


@dataclass(frozen=True)
class _Context:
    """Where equations run: in which region of the step, how often on average, and with which chance
    the branches that they are in are taken."""

    region: str
    weight: float
    chance: float = 1.0
    num_expectations: int = 0  # of trips, by the user, in the scope of the while loop around

    def inside(self, trips: float = 1.0, chance: float = 1.0) -> _Context:
        """In a loop of so many trips, or in a branch that is taken with this chance."""
        weight = self.weight * trips * chance
        return replace(self, weight=weight, chance=self.chance * chance)


_ONCE = _Context("", 1.0)


class _Builder:
    def __init__(self, step: TracedStep) -> None:
        self.step = step
        self.program = step.program
        self.values = type_values(step.program)
        self.nodes: list[Node] = []
        self.alias: dict[int, int] = {}  # program value -> graph value that replaces it
        self.shared: set[int] = set()  # inputs that have a USE node
        self.cut: set[int] = set()  # slices of such inputs: a layer's part of a stack
        self.product_sums: set[int] = set()  # FINISH results of products and of sums of them
        self.summed: set[int] = set()  # values that a sum of partial sums reads
        self.zeros: set[int] = set()  # values known to be zero
        self.unfinished: set[int] = set()  # values whose partial sums a loop adds up
        self.unruled: dict[tuple[str, str, str, Failure | None], list[float]] = {}  # their flops
        self.signature_of: list[_Signature | None] = []  # by equation, bodies included
        self.signatures: list[_Signature] = []
        self.while_loops: list[LoopTrips] = []
        self.loops: list[tuple[int, int]] = []  # nodes of each loop, outer loops first
        self.find_signatures()

    # -- rules

    def find_signatures(self) -> None:
        number_of: dict[Hashable, int] = {}
        distinct: list[Equation] = []
        numbers: list[int | None] = []
        for equation in self.program.all_equations():
            number = None
            if equation.name not in LOOPS:
                key = equation_key(equation, self.program.avals)
                number = number_of.setdefault(key, len(distinct))
                if number == len(distinct):
                    distinct.append(equation)
            numbers.append(number)
        rules = rules_of_equations(distinct, self.program.avals)
        for number, (equation, ruled) in enumerate(zip(distinct, rules, strict=True)):
            flops = equation_flops(equation, self.program.avals) if equation.results else 0.0
            rule = _without_constants(equation, ruled.rule)
            work = equation_work(equation, self.program.avals)
            part = part_bytes(equation, self.program.avals)
            node = Node(
                NodeKind.OP,
                equation.name,
                rule,
                (),
                (),
                flops=flops,
                signature=number,
                work=work,
                part_bytes=part,
                passes=array_passes(equation, self.program.avals),
            )
            self.signatures.append(_Signature(number, ruled, rule, flops, node))
        self.signature_of = [None if n is None else self.signatures[n] for n in numbers]

    # -- the graph

    def build(self) -> None:
        program, step = self.program, self.step
        state_inputs = {i for i, _ in step.state}
        for index, value in enumerate(program.inputs):
            self.values[value] = replace(self.values[value], path=step.call.paths[index])
            self.add_input(value, shared=index in state_inputs)
        self.add_captured(program)
        regions = equation_regions(program)
        self.walk(program, [_Context(region, 1.0) for region in regions], 0)

    def trips(self) -> dict[int, int]:
        """Nodes of layers that a stage runs as a loop, of the backward pass -> the last node of
        their trip."""
        nodes_of: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            if node.region == BACKWARD and node.equation is not None:
                nodes_of.setdefault(node.equation, []).append(index)
        trips: dict[int, int] = {}
        for run in rolled_layers(self.step, nodes_of.keys()):
            own = [sorted(i for e in trip for i in nodes_of.get(e, ())) for trip in run]
            heavy = [i for i in own[-1] if self.nodes[i].is_heavy]
            ends = [nodes[0] - 1 for nodes in own[1:]] + [max(heavy or own[-1])]
            for nodes, end in zip(own, ends, strict=True):
                trips.update((index, end) for index in nodes if index <= end)
        return trips

    def touched_bytes(
        self, index: int, in_memory: Collection[int], traffic: GraphTraffic
    ) -> tuple[float, ...]:
        node, moved = self.nodes[index], traffic.by_node[index]
        if index in traffic.of_updates:
            num_arrays = len(node.operands) + len(node.results)
            return (0.0,) * num_arrays if moved is None else moved.num_bytes
        if moved is not None and node.name == "scan_stack":
            return moved.num_bytes
        return touched_bytes(node, self.values, in_memory)

    def graph(self, overlaps: bool, instructions_per_byte: float) -> BuiltGraph:
        """The graph: nodes and values completed with what depends on all of them."""
        program, step = self.program, self.step
        outputs = tuple(self.read(o) if isinstance(o, int) else None for o in program.outputs)
        batch_inputs = [program.inputs[i] for i in step.batch]
        factors = batch_factors(self.nodes, self.values, batch_inputs)
        self.nodes = [self.pass_partial_sums(node) for node in self.nodes]
        if overlaps and not step.is_unrolled:
            # A stage pays for all of the stack that a slice reads, so that it does not gather a
            # stack as a whole to save the latency of gathering its rows.
            self.nodes = [n.having(part_bytes=None) if n.name == "slice" else n for n in self.nodes]
        state = tuple((i, o) for i, o in step.state if outputs[o] is not None)
        donated = set(step.donated)
        in_place = {outputs[o] for i, o in state if i in donated}
        known = overlaps, self.zeros, instructions_per_byte, cache(self.trips)
        basis = basis_of_lives(self.nodes, self.values, outputs, in_place, self.loops, *known)
        liveness = find_lives(basis, step.is_stage)
        traffic = node_traffic(
            self.nodes, self.values, liveness.in_memory, in_place, outputs, self.zeros
        )
        nodes = tuple(
            node.having(
                touched_bytes=self.touched_bytes(index, liveness.in_memory, traffic),
                batch_factor=factor,
                traffic=traffic.by_node[index],
            )
            for index, (node, factor) in enumerate(zip(self.nodes, factors, strict=True))
        )
        deferred = deferred_values(nodes, batch_inputs)
        orders = state_orders(nodes)
        values = tuple(
            _deferred(value, orders.get(index)) if index in deferred else value
            for index, value in enumerate(self.values)
        )
        producer = {
            result: (index, position)
            for index, node in enumerate(nodes)
            for position, result in enumerate(node.results)
        }
        unruled = tuple(
            Unruled(name, line, why, len(flops), sum(flops), failure)
            for (name, line, why, failure), flops in self.unruled.items()
        )
        graph = Graph(
            values=values,
            nodes=nodes,
            inputs=program.inputs,
            outputs=outputs,
            state=state,
            batch=step.batch,
            unruled=unruled,
            liveness=liveness,
            producer=producer,
            unfinished=frozenset(self.unfinished),
            while_loops=tuple(dict.fromkeys(self.while_loops)),
        )
        return BuiltGraph(graph, basis)

    def new_value(self, like: int) -> int:
        self.values.append(replace(self.values[like], path=None))
        return len(self.values) - 1

    def read(self, value: int) -> int:
        """The graph value for a program value."""
        return self.alias.get(value, value)

    def add_input(self, value: int, shared: bool) -> None:
        shape = self.values[value].shape
        self.nodes.append(Node(NodeKind.INPUT, "input", _identity(shape, 0), (), (value,)))
        if shared and shape:
            self.share(value)
            self.shared.add(value)

    def share(self, value: int) -> None:
        """Give a value made from state a second layout, common to all its readers."""
        use = self.new_value(value)
        self.add_use(value, use)
        self.alias[value] = use

    def add_use(self, value: int, use: int, here: _Context = _ONCE) -> None:
        rule = _identity(self.values[value].shape)
        node = Node(NodeKind.USE, "use", rule, (value,), (use,), here.weight)
        self.nodes.append(node.having(chance=here.chance))

    def add_constant(self, value: int) -> None:
        rule = replicated_rule((), (self.values[value],))
        self.nodes.append(Node(NodeKind.INPUT, "constant", rule, (), (value,)))

    def add_captured(self, program: Program) -> None:
        for value, _ in program.captured:
            self.add_constant(value)

    def walk(self, program: Program, around: _Context | Sequence[_Context], index: int) -> int:
        """Add the equations of a program, numbered from `index`; returns the index after the last.
        Bodies are numbered right after their loop."""
        for position, equation in enumerate(program.equations):
            if isinstance(around, _Context):
                region = region_by_name(equation.scope) or around.region
                here = replace(around, region=region) if region != around.region else around
            else:
                here = around[position]
            index += 1
            if equation.name == "scan":
                index = self.scan(equation, here, index)
            elif equation.name == "while":
                index = self.while_loop(equation, here, index)
            elif equation.name == "cond":
                index = self.cond(equation, here, index)
            elif equation.name == "optimization_barrier":
                self.barrier(equation, here, index - 1)
            elif equation.results:
                self.operation(equation, here, index - 1)
        return index

    def operation(self, equation: Equation, here: _Context, index: int) -> None:
        signature = self.signature_of[index]
        assert signature is not None
        if signature.ruled.warning:
            ruled = signature.ruled
            key = (equation.name, equation.source_line, ruled.warning, ruled.failure)
            self.unruled.setdefault(key, []).append(here.weight * signature.flops)
        # The update reads parameters in the layout they are stored in, all else in that of use.
        stored = self.shared if here.region == UPDATE else ()
        operands = tuple(v if v in stored else self.alias.get(v, v) for v in equation.inputs)
        rule = signature.rule
        if zeros := zeros_made(equation, self.zeros):
            self.zeros.update(zeros)
        if not self.unfinished.isdisjoint(equation.results):
            rule = _linear(rule) if equation.name in (*ADDITIONS, *LINEAR_UNARY) else rule
        elif rule.linear and not self.sums_partial(rule, operands):
            rule = _not_linear(rule)
        if rule.linear:
            self.summed.update(operands)
        partial = rule.linear or not rule.reduction <= rule.fixed
        results = equation.results
        if partial:
            results = tuple(self.new_value(r) for r in results)
        node = signature.node.having(
            rule=rule,
            operands=operands,
            results=results,
            weight=here.weight,
            chance=here.chance,
            module=module_name(equation.scope),
            region=here.region,
            equation=index,
        )
        self.nodes.append(node)
        if partial:
            self.finish(node, equation.results)
        elif here.region != UPDATE and self.values[results[0]].shape:
            self.share_parameter(equation)

    def share_parameter(self, equation: Equation) -> None:
        """A parameter that was cast, or cut out of a stack, is gathered once for all its readers:
        in the precision of its use, and without the other layers."""
        if equation.name not in ("slice", "squeeze", "convert_element_type"):
            return
        operand, result = equation.operands[0], equation.results[0]
        if not isinstance(operand, int) or not (operand in self.shared or operand in self.cut):
            return
        if equation.name != "convert_element_type":
            self.cut.add(result)
        if equation.name != "slice":
            self.share(result)

    def barrier(self, equation: Equation, here: _Context, index: int) -> None:
        """One node per operand: a barrier orders its operands but does not tie their layouts."""
        signature = self.signature_of[index]
        assert signature is not None
        for operand, result in zip(equation.operands, equation.results, strict=True):
            if not isinstance(operand, int):
                self.add_constant(result)
                continue
            self.nodes.append(
                Node(
                    NodeKind.OP,
                    equation.name,
                    _identity(self.values[result].shape),
                    (self.read(operand),),
                    (result,),
                    here.weight,
                    module=module_name(equation.scope),
                    region=here.region,
                    equation=index,
                    signature=signature.number,
                    chance=here.chance,
                )
            )

    def finish(self, node: Node, results: tuple[int, ...]) -> None:
        for raw, result in zip(node.results, results, strict=True):
            if node.is_heavy or node.rule.linear:
                self.product_sums.add(result)
            self.nodes.append(
                _FINISH.having(
                    rule=_identity(self.values[result].shape),
                    operands=(raw,),
                    results=(result,),
                    weight=node.weight,
                    chance=node.chance,
                    module=node.module,
                    region=node.region,
                    equation=node.equation,
                    signature=node.signature,
                )
            )

    def pass_partial_sums(self, node: Node) -> Node:
        """Let FINISH nodes pass partial sums on to an addition, or to a loop that only adds up."""
        if node.kind is not NodeKind.FINISH:
            return node
        if node.results[0] not in self.summed and node.results[0] not in self.unfinished:
            return node
        return node.having(rule=_linear(node.rule))

    def sums_partial(self, rule: Rule, operands: tuple[int, ...]) -> bool:
        """Whether a sum adds values that may all be partial sums: one reduction serves them all."""
        if len(operands) != 2 or rule.operands[0] != rule.operands[1]:
            return False
        return all(o in self.product_sums for o in operands)

    # -- loops

    def pass_into_loop(self, operand: Operand, value: int, here: _Context) -> None:
        """A value that a loop only reads has one layout in it, resharded outside."""
        if isinstance(operand, int) and operand in self.zeros:
            self.zeros.add(value)
        if not isinstance(operand, int):
            self.add_constant(value)
        elif self.values[value].shape:
            self.add_use(self.read(operand), value, here)
        else:
            self.alias[value] = self.read(operand)

    def scan(self, equation: Equation, here: _Context, index: int) -> int:
        (body,) = equation.bodies
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        first_x = num_consts + num_carry
        inner = here.inside(trips=max(equation.params["length"], 1))
        operands, inputs = equation.operands, body.inputs
        for operand, value in zip(operands[:num_consts], inputs[:num_consts], strict=True):
            self.pass_into_loop(operand, value, here)
        loop = self.open_loop()
        for operand, value in zip(operands[first_x:], inputs[first_x:], strict=True):
            if isinstance(operand, int):
                rule = _stacking_rule(self.values[value].shape, stack=False)
                self.stacking("scan_slice", rule, self.read(operand), value, equation, inner)
            else:
                self.add_constant(value)
        self.add_captured(body)
        carries = inputs[num_consts:first_x]
        sums = loop_sums(equation, self.zeros)
        self.unfinished |= sums.values
        merges = self.open_carries(operands[num_consts:first_x], carries, here)
        index = self.walk(body, inner, index)
        self.close_carries(merges, body.outputs[:num_carry])
        for position, (result, carry) in enumerate(
            zip(equation.results[:num_carry], carries, strict=True)
        ):
            if position in sums.carries:
                self.finish_carry(carry, result, sums.carries[position], here)
            else:
                self.alias[result] = carry
        for out, result in zip(body.outputs[num_carry:], equation.results[num_carry:], strict=True):
            if isinstance(out, int):
                rule = _stacking_rule(self.values[out].shape, stack=True)
                rule = _linear(rule) if result in self.unfinished else rule
                self.stacking("scan_stack", rule, self.read(out), result, equation, inner)
            else:
                self.add_constant(result)
        self.close_loop(loop)
        return index

    def open_loop(self) -> int:
        self.loops.append((len(self.nodes), len(self.nodes)))
        return len(self.loops) - 1

    def close_loop(self, loop: int) -> None:
        self.loops[loop] = (self.loops[loop][0], len(self.nodes))

    def stacking(
        self, name: str, rule: Rule, operand: int, result: int, scan: Equation, here: _Context
    ) -> None:
        """A node for reading a slice of an operand, or writing one to a result, each trip."""
        module = module_name(scan.scope)
        self.nodes.append(
            Node(
                NodeKind.OP,
                name,
                rule,
                (operand,),
                (result,),
                here.weight,
                module=module,
                region=here.region,
                chance=here.chance,
            )
        )

    def open_carries(
        self, inits: Sequence[Operand], carries: Sequence[int], here: _Context
    ) -> list[int]:
        """Add a MERGE node per carry; `close_carries` adds its last operand, the body's result."""
        first = len(self.nodes)
        for init, carry in zip(inits, carries, strict=True):
            self.merge("carry", [self.read(init)] if isinstance(init, int) else [], carry, here)
        return list(range(first, len(self.nodes)))

    def close_carries(self, merges: Sequence[int], outputs: Sequence[Operand]) -> None:
        for index, out in zip(merges, outputs, strict=True):
            if isinstance(out, int):
                node = self.nodes[index]
                operands = (*node.operands, self.read(out))
                rule = _identity(self.values[node.results[0]].shape, len(operands))
                if node.results[0] in self.unfinished:
                    rule = _linear(rule)
                self.nodes[index] = replace(node, operands=operands, rule=rule)

    def finish_carry(self, carry: int, result: int, addition: Equation, here: _Context) -> None:
        """Reduce a sum that a loop added up, once, after the loop."""
        self.nodes.append(
            Node(
                NodeKind.FINISH,
                "finish",
                _identity(self.values[result].shape),
                (carry,),
                (result,),
                here.weight,
                module=module_name(addition.scope),
                region=here.region,
                chance=here.chance,
            )
        )

    def merge(self, name: str, operands: list[int], result: int, here: _Context) -> None:
        rule = _identity(self.values[result].shape, len(operands))
        node = Node(NodeKind.MERGE, name, rule, tuple(operands), (result,), here.weight)
        self.nodes.append(node.having(chance=here.chance))

    def while_loop(self, equation: Equation, here: _Context, index: int) -> int:
        condition, body = equation.bodies
        found = while_trips(equation, here.num_expectations)
        self.while_loops.append(found)
        inner = here.inside(trips=found.trips)
        inner = replace(inner, num_expectations=len(expectations(equation.scope)))
        cond_consts = equation.params["cond_nconsts"]
        num_consts = cond_consts + equation.params["body_nconsts"]
        carries = body.inputs[num_consts - cond_consts :]
        const_inputs = (
            *condition.inputs[:cond_consts],
            *body.inputs[: num_consts - cond_consts],
        )
        for operand, value in zip(equation.operands[:num_consts], const_inputs, strict=True):
            self.pass_into_loop(operand, value, here)
        loop = self.open_loop()
        self.add_captured(condition)
        self.add_captured(body)
        merges = self.open_carries(equation.operands[num_consts:], carries, here)
        self.alias.update(zip(condition.inputs[cond_consts:], carries, strict=True))
        index = self.walk(condition, inner, index)
        index = self.walk(body, inner, index)
        self.close_carries(merges, body.outputs)
        self.close_loop(loop)
        self.alias.update(zip(equation.results, carries, strict=True))
        return index

    def cond(self, equation: Equation, here: _Context, index: int) -> int:
        """All branches are equally likely."""
        inside = here.inside(chance=1 / len(equation.bodies))
        for branch in equation.bodies:
            for operand, value in zip(equation.operands[1:], branch.inputs, strict=True):
                if isinstance(operand, int):
                    self.alias[value] = self.read(operand)
                else:
                    self.add_constant(value)
            self.add_captured(branch)
            index = self.walk(branch, inside, index)
        for position, result in enumerate(equation.results):
            outs = [branch.outputs[position] for branch in equation.bodies]
            self.merge("branch", [self.read(v) for v in values_in(outs)], result, here)
        return index


# -- rules and values that many nodes share, cached


_identity = lru_cache(maxsize=4096)(identity_rule)
_FINISH = Node(NodeKind.FINISH, "finish", identity_rule(()), (), ())


def type_values(program: Program) -> list[Value]:
    """The program's values as far as their types tell."""
    return [_value(*_type(aval)) for aval in program.avals]


def _type(aval: ShapedArray) -> tuple[tuple[int, ...], Any]:
    return getattr(aval, "shape", ()), getattr(aval, "dtype", None)


@lru_cache(maxsize=4096)
def _value(shape: tuple[int, ...], dtype: Any) -> Value:
    itemsize = getattr(dtype, "itemsize", 0) or 0
    return Value(tuple(shape), str(dtype), prod(shape) * itemsize)


@lru_cache(maxsize=4096)
def _deferred(value: Value, order: tuple[int, ...] | None) -> Value:
    return replace(value, deferred=True, order=order)


@lru_cache(maxsize=4096)
def _linear(rule: Rule) -> Rule:
    return replace(rule, linear=True)


@lru_cache(maxsize=4096)
def _not_linear(rule: Rule) -> Rule:
    return replace(rule, linear=False)


@lru_cache(maxsize=4096)
def _stacking_rule(slice_shape: tuple[int, ...], stack: bool) -> Rule:
    """The rule for reading a slice from, or writing it into, a stack along a new leading
    dimension."""
    rule = identity_rule(slice_shape)
    (dims,) = rule.results
    ends = ((dims,), (((), *dims),))
    operands, results = ends if stack else ends[::-1]
    return Rule(operands, results, rule.sizes)


def _without_constants(equation: Equation, rule: Rule) -> Rule:
    present = [isinstance(o, int) for o in equation.operands]
    if all(present):
        return rule
    operands = tuple(d for d, on in zip(rule.operands, present, strict=True) if on)
    return replace(rule, operands=operands, linear=False)
