"""From a traced program to the graph that is sharded.

One node per equation, with its Shardy rule, flops and bytes; loops are opened, their bodies' nodes
weighted by the trip count and their carries tied by `MERGE` nodes, so that a scan over layers is
solved like the layers themselves. Beside equations stand:

- `USE` nodes after state inputs, so that a parameter gathered once serves forward and backward;
- `FINISH` nodes after ops that can leave partial sums, where the solver chooses between all-reduce
  and reduce-scatter.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any


from autopar import _jax
from autopar.ir.graph import Graph, Node, NodeKind, Rule, Unruled, Value
from autopar.trace.flatten import TracedStep
from autopar.trace.program import LOOPS, Constant, Equation, Program
from autopar.trace.regions import FORWARD, UPDATE, equation_regions, module_name
from autopar.trace.rules import (
    RuledEquation,
    equation_key,
    identity_rule,
    replicated_rule,
    rules_of_equations,
)

# Ops that XLA does not fuse into their neighbours: they read and write memory.
_UNFUSED = frozenset(
    "dot_general conv_general_dilated gather scatter scatter-add scatter_add sort top_k "
    "dynamic_slice dynamic_update_slice concatenate cumsum cumlogsumexp cummax cumprod fft "
    "reduce_window reduce_window_sum reduce_window_max select_and_scatter_add cholesky "
    "triangular_solve custom_call pallas_call argsort".split()
)
_READS_PART = ("gather", "dynamic_slice")


def is_fused(name: str) -> bool:
    return name not in _UNFUSED


def build_graph(step: TracedStep) -> Graph:
    builder = _Builder(step)
    return builder.build()


class _Builder:
    def __init__(self, step: TracedStep) -> None:
        self.step = step
        self.program = step.program
        self.values: list[Value] = [_value(aval) for aval in self.program.avals]
        self.nodes: list[Node] = []
        self.alias: dict[int, int] = {}  # program value -> graph value that stands for it
        self.rules: dict[Any, tuple[int, RuledEquation]] = {}
        self.unruled: Counter[tuple[str, str]] = Counter()
        self.equation_index = 0
        self.shared_inputs: set[int] = set()
        self.product_sums: set[int] = set()  # FINISH results of products and of sums of them

    # -- rules

    def collect_rules(self) -> None:
        distinct: dict[Any, Equation] = {}
        self.keys: list[Any] = []

        def visit(program: Program) -> None:
            for equation in program.equations:
                key = None
                if equation.name not in LOOPS:
                    key = equation_key(equation, program.avals)
                    distinct.setdefault(key, equation)
                self.keys.append(key)
                for body in equation.bodies:
                    visit(body)

        visit(self.program)
        equations = list(distinct.values())
        ruled = rules_of_equations(equations, self.program.avals)
        for number, (key, rule) in enumerate(zip(distinct, ruled, strict=True)):
            self.rules[key] = (number, rule)

    # -- nodes

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def new_value(self, like: int, **changes: Any) -> int:
        self.values.append(replace(self.values[like], **changes))
        return len(self.values) - 1

    def build(self) -> Graph:
        self.collect_rules()
        program, step = self.program, self.step
        state_inputs = {i for i, _ in step.state}
        for index, value in enumerate(program.inputs):
            self.values[value] = replace(self.values[value], path=step.call.paths[index])
            self.add_input(value, "input", shared=index in state_inputs)
        for value, _ in program.captured:
            self.add_constant(value)
        regions = equation_regions(program)
        self.walk(program, regions, weight=1.0)
        outputs = tuple(
            self.alias.get(o, o) if isinstance(o, int) else None for o in program.outputs
        )
        graph = Graph(
            values=tuple(self.values),
            nodes=tuple(self.nodes),
            inputs=tuple(program.inputs),
            outputs=outputs,
            state=tuple((i, o) for i, o in step.state if outputs[o] is not None),
            batch=step.batch,
            unruled=tuple(
                Unruled(name, source, count) for (name, source), count in self.unruled.items()
            ),
        )
        for index, node in enumerate(graph.nodes):
            for position, result in enumerate(node.results):
                graph.producer[result] = (index, position)
        return _annotate(graph)

    def add_input(self, value: int, name: str, shared: bool) -> None:
        shape = self.values[value].shape
        rule = identity_rule(shape, 0)
        self.add(Node(NodeKind.INPUT, name, rule, (), (value,)))
        if shared and shape:
            use = self.new_value(value)
            self.add(Node(NodeKind.USE, "use", identity_rule(shape), (value,), (use,)))
            self.alias[value] = use
            self.shared_inputs.add(value)

    def add_constant(self, value: int) -> None:
        rule = replicated_rule((), (self.values[value],))
        self.add(Node(NodeKind.INPUT, "constant", rule, (), (value,)))

    def read(self, operand: int) -> int:
        return self.alias.get(operand, operand)

    def walk(self, program: Program, regions: list[str] | str, weight: float) -> None:
        for position, equation in enumerate(program.equations):
            region = regions if isinstance(regions, str) else regions[position]
            index = self.equation_index
            self.equation_index += 1
            if equation.name == "scan":
                self.scan(equation, region, weight)
            elif equation.name == "while":
                self.while_loop(equation, region, weight)
            elif equation.name == "cond":
                self.cond(equation, region, weight)
            elif equation.results:
                self.operation(equation, index, region, weight)

    def operation(self, equation: Equation, index: int, region: str, weight: float) -> None:
        number, ruled = self.rules[self.keys[index]]
        rule = ruled.rule
        if ruled.unruled_ops:
            self.unruled[equation.name, equation.source_line] += 1
        present = [k for k, o in enumerate(equation.operands) if isinstance(o, int)]
        # The update reads parameters where they are kept, everything else where they are used.
        read = (lambda o: o if o in self.shared_inputs else self.read(o)) if region == UPDATE else self.read
        operands = tuple(read(equation.operands[k]) for k in present)
        rule = replace(rule, operands=tuple(rule.operands[k] for k in present))
        if not all(isinstance(o, int) for o in equation.operands):
            rule = replace(rule, linear=False)
        rule = replace(rule, linear=rule.linear and self.sums_partial(rule, operands))
        partial = bool(rule.reduction - rule.fixed) or rule.linear
        results = equation.results
        if partial:
            results = tuple(self.new_value(r) for r in equation.results)
        node = Node(
            kind=NodeKind.OP,
            name=equation.name,
            rule=rule,
            operands=operands,
            results=results,
            weight=weight,
            flops=_flops(equation, rule, self.program.avals),
            module=module_name(equation.scope),
            region=region if isinstance(region, str) else FORWARD,
            equation=index,
            signature=number,
        )
        self.add(node)
        if partial:
            for raw, result in zip(results, equation.results, strict=True):
                shape = self.values[result].shape
                if node.is_heavy or rule.linear:
                    self.product_sums.add(result)
                self.add(
                    replace(
                        node,
                        kind=NodeKind.FINISH,
                        name="finish",
                        rule=identity_rule(shape),
                        operands=(raw,),
                        results=(result,),
                        flops=0.0,
                    )
                )

    def sums_partial(self, rule: Rule, operands: tuple[int, ...]) -> bool:
        """A sum of values that may all be partial sums: one reduction can serve them all."""
        if len(operands) != 2 or rule.operands[0] != rule.operands[1]:
            return False
        return all(o in self.product_sums for o in operands)

    # -- loops

    def bind_constant_operand(self, operand: Constant, value: int) -> None:
        """A body input whose operand is a literal."""
        self.add_constant(value)

    def merge(self, operands: list[int], result: int, weight: float, name: str) -> None:
        shape = self.values[result].shape
        rule = identity_rule(shape, len(operands))
        self.add(Node(NodeKind.MERGE, name, rule, tuple(operands), (result,), weight=weight))

    def pass_into(self, operand: Any, value: int) -> None:
        if isinstance(operand, Constant):
            self.bind_constant_operand(operand, value)
        else:
            self.alias[value] = self.read(operand)

    def scan(self, equation: Equation, region: str, weight: float) -> None:
        (body,) = equation.bodies
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        length = equation.params["length"]
        inner = weight * max(length, 1)
        first_x = num_consts + num_carry
        for operand, value in zip(
            equation.operands[:num_consts], body.inputs[:num_consts], strict=True
        ):
            self.pass_into(operand, value)
        for operand, value in zip(equation.operands[first_x:], body.inputs[first_x:], strict=True):
            if isinstance(operand, Constant):
                self.bind_constant_operand(operand, value)
            else:
                rule = _stacking_rule(self.values[value].shape, stack=False)
                self.add(
                    Node(
                        NodeKind.OP,
                        "scan_slice",
                        rule,
                        (self.read(operand),),
                        (value,),
                        weight=inner,
                        region=region,
                    )
                )
        for value, const in body.captured:
            del const
            self.add_constant(value)
        carries = body.inputs[num_consts:first_x]
        merges = self.open_carries(equation.operands[num_consts:first_x], carries, weight)
        self.walk(body, region, inner)
        self.close_carries(merges, body.outputs[:num_carry])
        for value, result in zip(carries, equation.results[:num_carry], strict=True):
            self.alias[result] = value
        for out, result in zip(
            body.outputs[num_carry:], equation.results[num_carry:], strict=True
        ):
            if isinstance(out, Constant):
                self.add_constant(result)
                continue
            self.add(
                Node(
                    NodeKind.OP,
                    "scan_stack",
                    _stacking_rule(self.values[self.read(out)].shape, stack=True),
                    (self.read(out),),
                    (result,),
                    weight=inner,
                    region=region,
                )
            )

    def open_carries(self, inits: Any, carries: Any, weight: float) -> list[int]:
        """A MERGE node per carry; its second operand, the body's result, is put in later."""
        merges = []
        for init, carry in zip(inits, carries, strict=True):
            operands = [self.read(init)] if isinstance(init, int) else []
            self.merge(operands, carry, weight, "carry")
            merges.append(len(self.nodes) - 1)
        return merges

    def close_carries(self, merges: list[int], outputs: Any) -> None:
        for index, out in zip(merges, outputs, strict=True):
            if isinstance(out, Constant):
                continue
            node = self.nodes[index]
            operands = (*node.operands, self.read(out))
            shape = self.values[node.results[0]].shape
            rule = identity_rule(shape, len(operands))
            self.nodes[index] = replace(node, operands=operands, rule=rule)

    def while_loop(self, equation: Equation, region: str, weight: float) -> None:
        condition, body = equation.bodies
        cond_consts = equation.params["cond_nconsts"]
        body_consts = equation.params["body_nconsts"]
        operands = equation.operands
        for program, first, count in (
            (condition, 0, cond_consts),
            (body, cond_consts, body_consts),
        ):
            for operand, value in zip(
                operands[first : first + count], program.inputs[:count], strict=True
            ):
                self.pass_into(operand, value)
            for value, _ in program.captured:
                self.add_constant(value)
        inits = operands[cond_consts + body_consts :]
        carries = body.inputs[body_consts:]
        merges = self.open_carries(inits, carries, weight)
        for value, carry in zip(condition.inputs[cond_consts:], carries, strict=True):
            self.alias[value] = carry
        self.walk(condition, region, weight)
        self.walk(body, region, weight)
        self.close_carries(merges, body.outputs)
        for carry, result in zip(carries, equation.results, strict=True):
            self.alias[result] = carry

    def cond(self, equation: Equation, region: str, weight: float) -> None:
        for branch in equation.bodies:
            for operand, value in zip(equation.operands[1:], branch.inputs, strict=True):
                self.pass_into(operand, value)
            for value, _ in branch.captured:
                self.add_constant(value)
            self.walk(branch, region, weight)
        for position, result in enumerate(equation.results):
            outs = [branch.outputs[position] for branch in equation.bodies]
            operands = [self.read(o) for o in outs if isinstance(o, int)]
            self.merge(operands, result, weight, "branch")


def _value(aval: Any) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    itemsize = getattr(dtype, "itemsize", 0) or 0
    return Value(shape, str(dtype), prod(shape) * itemsize)


def _stacking_rule(slice_shape: tuple[int, ...], stack: bool) -> Rule:
    """A slice taken from, or put into, a stack along a new leading dimension."""
    rule = identity_rule(slice_shape)
    dims = rule.results[0]
    stacked = ((), *dims)
    pair = ((dims,), (stacked,)) if stack else ((stacked,), (dims,))
    return Rule(pair[0], pair[1], rule.sizes)


def _flops(equation: Equation, rule: Rule, avals: list[Any]) -> float:
    result = avals[equation.results[0]]
    size = float(prod(getattr(result, "shape", ())))
    if equation.name == "dot_general":
        lhs = equation.operands[0]
        shape = lhs.aval.shape if isinstance(lhs, Constant) else avals[lhs].shape
        (contracting, _), _ = equation.params["dimension_numbers"]
        return 2.0 * size * prod(shape[d] for d in contracting)
    if equation.name == "conv_general_dilated":
        rhs = equation.operands[1]
        shape = rhs.aval.shape if isinstance(rhs, Constant) else avals[rhs].shape
        out_feature = equation.params["dimension_numbers"].rhs_spec[0]
        groups = equation.params["batch_group_count"]
        return 2.0 * size * prod(shape) / shape[out_feature] / max(groups, 1)
    sizes = [
        float(prod(getattr(o.aval if isinstance(o, Constant) else avals[o], "shape", ())))
        for o in equation.operands
    ]
    return max([size, *sizes])


def _annotate(graph: Graph) -> Graph:
    """Add what needs the whole graph: batch factors, bytes touched, deferred values."""
    consumers: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for value in node.operands:
            consumers.setdefault(value, []).append(index)
    batch_factor = _batch_factors(graph)
    nodes = []
    outputs = set(graph.outputs)
    for index, node in enumerate(graph.nodes):
        touched = _touched_bytes(graph, node, consumers, outputs)
        nodes.append(replace(node, touched_bytes=touched, batch_factor=batch_factor[index]))
    deferred = _deferred_values(graph, consumers)
    values = tuple(
        replace(v, deferred=True) if i in deferred else v for i, v in enumerate(graph.values)
    )
    return replace(graph, nodes=tuple(nodes), values=values)


def _touched_bytes(
    graph: Graph, node: Node, consumers: dict[int, list[int]], outputs: set[int | None]
) -> tuple[float, ...]:
    """Bytes a node moves to and from memory, given what XLA fuses."""
    if node.kind is not NodeKind.OP:
        return (0.0,) * (len(node.operands) + len(node.results))

    def in_memory(value: int) -> bool:
        index, _ = graph.producer[value]
        producer = graph.nodes[index]
        if producer.kind is not NodeKind.OP or not is_fused(producer.name):
            return True
        if value in outputs:
            return True
        readers = [graph.nodes[c] for c in consumers.get(value, ())]
        return any(
            not is_fused(r.name) or r.region != producer.region or r.kind is not NodeKind.OP
            for r in readers
        )

    touched = [
        float(graph.values[v].num_bytes) if in_memory(v) else 0.0
        for v in (*node.operands, *node.results)
    ]
    if node.name in _READS_PART:  # only the part that is taken is read
        touched[0] = min(touched[0], float(graph.values[node.results[0]].num_bytes))
    return tuple(touched)


def _batch_factors(graph: Graph) -> list[int | None]:
    """Follow the batch dimension of the batch inputs through the rules."""
    batch_dim: dict[int, int] = {
        graph.inputs[i]: 0 for i in graph.batch if graph.values[graph.inputs[i]].shape
    }
    factors: list[int | None] = [None] * len(graph.nodes)
    for _ in range(2):  # twice: loop carries learn from their bodies
        for index, node in enumerate(graph.nodes):
            factor = None
            for value, dims in zip(node.operands, node.rule.operands, strict=True):
                dim = batch_dim.get(value)
                if dim is not None and dims[dim]:
                    factor = dims[dim][0]
                    break
            if node.kind is NodeKind.INPUT and node.results[0] in batch_dim:
                dims = node.rule.results[0]
                factor = dims[0][0] if dims and dims[0] else None
            factors[index] = factor
            if factor is None:
                continue
            for value, dims in zip(node.results, node.rule.results, strict=True):
                for dim, own in enumerate(dims):
                    if own and own[0] == factor:
                        batch_dim[value] = dim
                        break
    return factors


def _deferred_values(graph: Graph, consumers: dict[int, list[int]]) -> set[int]:
    """Values that only the update reads, and values made from state alone."""
    deferred: set[int] = set()
    from_state: set[int] = set()
    batch_inputs = {graph.inputs[i] for i in graph.batch}
    for node in graph.nodes:
        if node.kind is NodeKind.INPUT:
            from_state.update(v for v in node.results if v not in batch_inputs)
        elif node.operands and all(v in from_state for v in node.operands):
            from_state.update(node.results)
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        for value in node.results:
            readers = [graph.nodes[c] for c in consumers.get(value, ())]
            if all(
                r.region == UPDATE or (r.results and all(v in deferred for v in r.results))
                for r in readers
            ):
                deferred.add(value)
    return deferred | from_state


def stablehlo_ops(step: TracedStep) -> dict[str, bool]:
    """Every StableHLO op the step's equations lower to, and whether a rule was found."""
    builder = _Builder(step)
    builder.collect_rules()
    ops: dict[str, bool] = {}
    for _, ruled in builder.rules.values():
        for name in ruled.op_names:
            ops[name] = ops.get(name, True) and name not in ruled.unruled_ops
    return ops


