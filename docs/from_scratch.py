"""# The core from scratch

This page is a program. It rebuilds the core of autopar in a few hundred lines, for one axis of
devices and steps without loops, with nothing but JAX, NumPy and a solver. It traces a train step,
asks Shardy how each operator can be split, prices every way to do so, chooses by integer
programming, writes the choice back on the program, and runs it. Then it cuts a model into pipeline
stages by dynamic programming. Run it from a clone: `python docs/from_scratch.py`.

The end lists what autopar does beyond this. A test compares the costs found here with autopar's.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from math import inf, prod
from typing import Any

if __name__ == "__main__":  # eight virtual devices, unless the caller has others
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pulp
from jax.sharding import NamedSharding, PartitionSpec

# The one private part of JAX that this page needs: jaxlib's pass manager, which runs Shardy's pass
# on a lowered program. autopar keeps all such parts in `_jax.py`.

from jaxlib.mlir.passmanager import PassManager  # isort: skip


def write_rules(module: Any) -> None:
    """Every operator of a StableHLO module gains the attribute `sdy.sharding_rule`."""
    with module.context:
        passes = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
        PassManager.parse(passes).run(module.operation)


# ## 1. Trace
#
# `jax.make_jaxpr` runs the step on shapes and writes down every primitive that it calls: the
# forward pass, the backward pass that `jax.grad` made of it, and the optimizer, in one list. Calls
# (`jit`, custom derivatives, `checkpoint`) are opened, so that the list is flat, and every array
# gets a number. The model needs no declarations.

CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}


@dataclass
class Op:
    """A primitive with its parameters; an operand is the number of a value, or a constant."""

    primitive: Any
    params: dict[str, Any]
    operands: list[Any]
    results: list[int]

    def numbered(self) -> list[tuple[int, int]]:
        """(position, number) of the operands that are values."""
        return [(i, v) for i, v in enumerate(self.operands) if isinstance(v, int)]


@dataclass
class Program:
    """A flat list of operators. `avals` are shapes and types by number; inputs come first."""

    avals: list[Any] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    num_state: int = 0
    in_tree: Any = None
    out_tree: Any = None


def trace(step: Any, state: Any, batch: Any) -> Program:
    """The flat program of `step(state, batch)`, which returns the new state and something else."""
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
    program = Program(num_state=len(jax.tree.leaves(state)))
    program.in_tree = jax.tree.structure((state, batch))
    program.out_tree = jax.tree.structure(shapes)

    def new(aval: Any) -> int:
        program.avals.append(aval)
        return len(program.avals) - 1

    def open_jaxpr(jaxpr: Any, consts: Any, arguments: list[Any]) -> list[Any]:
        names = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
        names |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return np.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else names[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in CALLS:
                body, its_consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                results = open_jaxpr(body, its_consts, operands)
            elif inner is not None or eqn.primitive.name in ("while", "cond"):
                raise NotImplementedError(f"{eqn.primitive.name}: this rebuild enters no loops")
            else:
                results = [new(var.aval) for var in eqn.outvars]
                program.ops.append(Op(eqn.primitive, eqn.params, operands, results))
            names.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    program.inputs = [new(var.aval) for var in closed.jaxpr.invars]
    program.outputs = open_jaxpr(closed.jaxpr, closed.consts, list(program.inputs))
    return program


# ## 2. Rules
#
# How can an operator be split? Like an einsum: a matrix product is `ik, kj -> ij`. Splitting `i`
# splits the rows of the first operand and of the result, and no device needs anything from another;
# splitting `k` leaves partial sums. Shardy, XLA's partitioner, has such a rule for every operator,
# and we ask it instead of writing our own. Each letter is a *factor*.
#
# A primitive may be lowered to several operators. Their rules are composed: dimensions that some
# operator ties together get one factor, found by a union-find. A dimension can hold several
# factors (a reshape that takes `ij` to `i, j`); on one axis only the first of them can be split.


@dataclass(frozen=True)
class Rule:
    """The factor of every dimension of the operands and of the results (None: not to be split)."""

    operands: list[list[int | None]]
    results: list[list[int | None]]
    sizes: dict[int, int]


def rule_of(op: Op, avals: list[Any]) -> Rule:
    """Lower one operator by itself, have Shardy write its rules, and compose them."""
    shapes = [jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype) for _, v in op.numbered()]
    module = jax.jit(lambda *values: bind(op, values)).lower(*shapes).compiler_ir("stablehlo")
    write_rules(module)
    body = module.body.operations[0].regions[0].blocks[0]
    *lowered, end = body.operations
    ties = Ties()
    for operation in lowered:
        ties.add(operation)
    numbers: dict[Any, int] = {}
    sizes: dict[int, int] = {}

    def factors(value: Any, keep: Any) -> list[int | None]:
        found: list[int | None] = []
        for dim, size in enumerate(value.type.shape):
            root = ties.find((value, dim))
            found.append(numbers.setdefault(root, len(numbers)) if keep(root) else None)
            if found[-1] is not None:
                sizes[found[-1]] = min(size, sizes.get(found[-1], size))
        return found

    fixed, summed = ({ties.find(a) for a in marked} for marked in (ties.fixed, ties.summed))
    results = [factors(value, lambda root: root not in fixed) for value in end.operands]
    kept = set(numbers) | (summed - fixed)
    given = iter([factors(value, lambda root: root in kept) for value in body.arguments])
    operands = [next(given) if isinstance(v, int) else [None] * v.ndim for v in op.operands]
    return Rule(operands, results, sizes)


@dataclass
class Ties:
    """A union-find over dimensions (value, position); some factors are fixed, some are summed."""

    parent: dict[Any, Any] = field(default_factory=dict)
    fixed: set[Any] = field(default_factory=set)
    summed: set[Any] = field(default_factory=set)

    def find(self, a: Any) -> Any:
        while self.parent.setdefault(a, a) != a:
            a = self.parent[a]
        return a

    def add(self, operation: Any) -> None:
        """Dimensions to which the operator's rule gives one letter become one factor:
        `rule<([i, k], [k, j])->([i, j]) {i=8, j=4, k=2} reduction={k}>`"""
        values = [*operation.operands, *operation.results]
        if "sdy.sharding_rule" not in operation.attributes:
            if operation.operands and not operation.operation.name.startswith("chlo."):
                raise NotImplementedError(f"{operation.operation.name} has no rule")
            for value in values:  # a constant, or elementwise
                for dim in range(len(value.type.shape)):
                    self.parent[self.find((value, dim))] = self.find((values[-1], dim))
            return
        text = str(operation.attributes["sdy.sharding_rule"])
        sizes = {letter: int(size) for letter, size in re.findall(r"(\w+)=(\d+)", text)}
        letters = {letter: object() for letter in sizes}
        for value, dims in zip(values, re.findall(r"\[(.*?)\]", text), strict=True):
            for dim, held in enumerate(dims.split(", ") if dims else []):
                major, *minor = re.findall(r"[a-z](?:_\d+)?", held)
                self.fixed.update(letters[letter] for letter in minor)
                if sizes[major] == 1:
                    self.fixed.add((value, dim))  # nothing to split, and tied to nothing
                else:
                    self.parent[self.find((value, dim))] = self.find(letters[major])
        for kind, held in re.findall(r"(\w+)=\{(.*?)\}", text):
            marked = self.summed if kind == "reduction" else self.fixed
            marked.update(letters[letter] for letter in held.split(", ") if letter)


def bind(op: Op, values: Any) -> list[Any]:
    """Call the primitive on values in place of its numbered operands."""
    given = iter(values)
    operands = [next(given) if isinstance(v, int) else v for v in op.operands]
    out = op.primitive.bind(*operands, **op.params)
    return list(out) if op.primitive.multiple_results else [out]


# ## 3. Strategies and costs
#
# On one axis of n devices an array has few *layouts*: `WHOLE` on every device, split along one of
# its dimensions, or `PARTIAL`, an addend on each. A *strategy* of an operator puts the axis on one
# of its factors, or on none, which gives a layout for each operand and result.
#
# An array that is read in another layout than it was made in must be resharded. With B its bytes,
# α the seconds per message and β the seconds per byte, rings take:

WHOLE, PARTIAL = -1, -2


@dataclass(frozen=True)
class Axis:
    """n devices in a ring."""

    size: int
    alpha: float = 1.0
    beta: float = 0.01

    def reshard(self, num_bytes: int, a: int, b: int) -> float:
        """From layout `a` to layout `b`."""
        n, share = self.size, (self.size - 1) / self.size
        if a in (b, WHOLE):  # each device takes its part of what it has
            return inf if b == PARTIAL and a != b else 0.0
        if b == PARTIAL:
            return inf
        if a == PARTIAL:
            rounds = 2 if b == WHOLE else 1  # all-reduce, or reduce-scatter
            return self.alpha + self.beta * rounds * share * num_bytes
        if b == WHOLE:
            return self.alpha + self.beta * share * num_bytes  # all-gather
        return self.alpha + self.beta * share / n * num_bytes  # all-to-all


@dataclass(frozen=True)
class Strategy:
    """Layouts of an operator's operands (None for constants) and of its results."""

    operands: tuple[int | None, ...]
    results: tuple[int, ...]


def strategies_of(op: Op, rule: Rule, axis: Axis) -> list[Strategy]:
    """All ways to put the axis on a factor. A product that can be split is never replicated:
    compute has no price here, so nothing else would prevent that."""

    def split(dims: list[int | None], factor: int, otherwise: int) -> int:
        return dims.index(factor) if factor in dims else otherwise

    found = []
    for factor, size in rule.sizes.items():
        if size % axis.size:
            continue
        summed = not any(factor in dims for dims in rule.results)
        operands = tuple(
            split(dims, factor, WHOLE) if isinstance(v, int) else None
            for dims, v in zip(rule.operands, op.operands, strict=True)
        )
        otherwise = PARTIAL if summed else WHOLE
        found.append(Strategy(operands, tuple(split(d, factor, otherwise) for d in rule.results)))
    if op.primitive.name in ("add", "add_any") and len(op.numbered()) == 2:
        found.append(Strategy((PARTIAL, PARTIAL), (PARTIAL,)))  # a sum of sums is a sum
    if op.primitive.name != "dot_general" or not found:
        nothing = tuple(WHOLE if isinstance(v, int) else None for v in op.operands)
        found.append(Strategy(nothing, (WHOLE,) * len(op.results)))
    return found


# ## 4. Choose
#
# Now it is a problem on a graph. A node is an input, an operator, or the place behind an operator
# where partial sums are finished (so that this is paid once, however many read the result). Each
# takes one of its strategies; each edge costs the resharding from the layout that is made to the
# layout that is read. State adds an edge from its new value back to the input: it must leave the
# step in the layout in which it entered.
#
# As an integer programme: x[node, s] is 1 for the chosen strategy, y[edge, s, t] for the pair at
# the ends of an edge, and the pairs add up to the strategies,
#
#     minimise    Σ cost[e, s, t] · y[e, s, t]
#     subject to  Σ_s x[v, s] = 1,   Σ_t y[e, s, t] = x[v, s],   Σ_s y[e, s, t] = x[w, t].
#
# In this form the linear relaxation is nearly always integral already, so the solver finds an
# optimum, with a proof, in about a second.


@dataclass
class Sharding:
    """What was chosen: the layout of every value, and in which layouts operators read."""

    cost: float
    layouts: dict[int, int]
    reads: list[tuple[int | None, ...]]
    num_variables: int


def choose(program: Program, axis: Axis) -> Sharding:
    """The cheapest strategies, by integer programming."""
    rules: dict[str, Rule] = {}
    options: list[list[Any]] = []  # node -> its strategies
    edges: list[tuple[int, int, list[list[float]]]] = []
    made_by: dict[int, tuple[int, Any]] = {}  # value -> (node, layout of it under a strategy)

    def node(strategies: list[Any]) -> int:
        options.append(strategies)
        return len(options) - 1

    def connect(value: int, reader: int, layout_read: Any) -> None:
        maker, layout_made = made_by[value]
        num_bytes = prod(program.avals[value].shape) * program.avals[value].dtype.itemsize
        table = [
            [axis.reshard(num_bytes, layout_made(s), layout_read(t)) for t in options[reader]]
            for s in options[maker]
        ]
        if any(any(row) for row in table):
            edges.append((maker, reader, table))

    def layouts(value: int) -> list[int]:
        shape = program.avals[value].shape
        return [WHOLE, *(d for d, size in enumerate(shape) if size % axis.size == 0 and size)]

    for value in program.inputs:
        made_by[value] = (node(layouts(value)), lambda layout: layout)
    op_nodes = []
    for op in program.ops:
        key = f"{op.primitive} {sorted(op.params.items(), key=str)} " + " ".join(
            str(program.avals[v]) if isinstance(v, int) else "constant" for v in op.operands
        )
        if key not in rules:
            rules[key] = rule_of(op, program.avals)
        number = node(strategies_of(op, rules[key], axis))
        op_nodes.append(number)
        for position, value in op.numbered():
            connect(value, number, lambda s, p=position: s.operands[p])
        for position, value in enumerate(op.results):
            made_by[value] = (number, lambda s, p=position: s.results[p])
            if any(s.results[position] == PARTIAL for s in options[number]):
                finish = node([*layouts(value), PARTIAL])
                connect(value, finish, lambda layout: layout)
                made_by[value] = (finish, lambda layout: layout)
    for value, back in zip(program.outputs, [*program.inputs[: program.num_state]], strict=False):
        connect(value, made_by[back][0], lambda layout: layout)
    for value in program.outputs:  # whatever leaves the step is finished
        connect(value, node(layouts(value)), lambda layout: layout)

    chosen, cost, size = solve(options, edges)
    return Sharding(
        cost,
        {value: layout(options[n][chosen[n]]) for value, (n, layout) in made_by.items()},
        [options[n][chosen[n]].operands for n in op_nodes],
        size,
    )


def solve(options: list[list[Any]], edges: list[Any]) -> tuple[list[int], float, int]:
    """The chosen strategy of every node, what it costs, and how many variables that took."""
    problem = pulp.LpProblem("sharding", pulp.LpMinimize)
    x = [
        [problem.add_variable(f"x_{v}_{s}", 0, 1, pulp.LpInteger) for s in range(len(strategies))]
        for v, strategies in enumerate(options)
    ]
    terms, num_pairs = [], 0
    for row in x:
        problem += pulp.lpSum(row) == 1
    for number, (v, w, table) in enumerate(edges):
        y = {
            (s, t): problem.add_variable(f"y_{number}_{s}_{t}", 0, 1)
            for s, row in enumerate(table)
            for t, cost in enumerate(row)
            if cost < inf
        }
        num_pairs += len(y)
        terms += [table[s][t] * pair for (s, t), pair in y.items() if table[s][t]]
        for s in range(len(x[v])):
            problem += pulp.lpSum(pair for (a, _), pair in y.items() if a == s) == x[v][s]
        for t in range(len(x[w])):
            problem += pulp.lpSum(pair for (_, b), pair in y.items() if b == t) == x[w][t]
    problem += pulp.lpSum(terms)
    solved = problem.solve(pulp.HiGHS(msg=False))
    status = getattr(solved, "status", solved)  # PuLP 4 returns statistics, PuLP 3 only the status
    assert status == 1, f"not solved to optimality: PuLP's status {status}"
    chosen = [max(range(len(row)), key=lambda s: row[s].value()) for row in x]
    cost = sum(table[chosen[v]][chosen[w]] for v, w, table in edges)
    return chosen, cost, num_pairs + sum(map(len, x))


# ## 5. Write it back, and run
#
# The program is run again, operator by operator, under `jax.jit`, with a sharding constraint on
# every operand that is read in another layout and on every result. XLA's partitioner then has
# nothing left to decide: it inserts the collectives that were priced.


def apply(program: Program, sharding: Sharding, mesh: jax.sharding.Mesh) -> Any:
    """A jitted function like the step, with the chosen shardings written on it."""

    def placed(value: Any, layout: int | None) -> Any:
        if layout is None or layout == PARTIAL or not jnp.ndim(value):
            return value
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec(layout)))

    def run(*arguments: Any) -> Any:
        values = dict(zip(program.inputs, jax.tree.leaves(arguments), strict=True))
        for op, reads in zip(program.ops, sharding.reads, strict=True):
            operands = [placed(values[v], reads[i]) for i, v in op.numbered()]
            for value, result in zip(op.results, bind(op, operands), strict=True):
                values[value] = placed(result, sharding.layouts[value])
        results = [values[v] if isinstance(v, int) else v for v in program.outputs]
        return jax.tree.unflatten(program.out_tree, results)

    leaves = [NamedSharding(mesh, spec(sharding.layouts[v])) for v in program.inputs]
    return jax.jit(run, in_shardings=jax.tree.unflatten(program.in_tree, leaves))


def spec(layout: int) -> PartitionSpec:
    return PartitionSpec() if layout < 0 else PartitionSpec(*(None,) * layout, "x")


# ## 6. Stages
#
# Between stages of a pipeline only activations travel, which is little, but a stage waits for the
# one before it. With c_i the seconds that stage i takes for a micro-batch, n micro-batches take
#
#     Σ c_i  +  (n − 1) · max c_i
#
# The first term is the first micro-batch's way through all stages, the second the pace of the
# slowest stage. Which layers go together, and how many devices does each stage get?
# If the slowest stage were known, the rest would be a shortest path: least(l, d) is the smallest
# sum for the layers from l on, on d devices, with no stage slower than the bound. So every possible
# bound is tried.


def choose_stages(
    seconds: dict[int, list[float]], num_devices: int, num_micro_batches: int
) -> tuple[float, list[tuple[int, int, int]]]:
    """`seconds[m][l]`: layer l on m devices, for one micro-batch. Gives the time of a step, and
    (first layer, end, devices) of each stage."""
    num_layers = len(next(iter(seconds.values())))
    total = {m: np.concatenate([[0.0], np.cumsum(row)]) for m, row in seconds.items()}
    ranges = [(a, b) for a in range(num_layers) for b in range(a + 1, num_layers + 1)]
    bounds = sorted({total[m][b] - total[m][a] for m in total for a, b in ranges})
    best, best_stages = inf, []
    for bound in bounds:
        if (num_micro_batches - 1) * bound >= best:
            break

        @cache
        def least(start: int, devices: int, bound: float = bound) -> tuple[float, Any]:
            if start == num_layers or devices == 0:
                return (0.0, ()) if start == num_layers and devices == 0 else (inf, ())
            found = [(inf, ())]
            for m, end in itertools.product(total, range(start + 1, num_layers + 1)):
                cost = total[m][end] - total[m][start]
                if m <= devices and cost <= bound:
                    rest, stages = least(end, devices - m)
                    found.append((cost + rest, ((start, end, m), *stages)))
            return min(found)

        cost, stages = least(0, num_devices)
        if stages and cost + (num_micro_batches - 1) * bound < best:
            slowest = max(total[m][b] - total[m][a] for a, b, m in stages)
            best = cost + (num_micro_batches - 1) * slowest
            best_stages = list(stages)
    return best, best_stages


# ## Two models, and what comes out
#
# A stack of dense layers with a large batch should come out data parallel; with a small batch,
# split by columns and rows in turn, as Megatron does by hand. Nothing in the model says so.


def trained(model: Any) -> Any:
    """A step of plain gradient descent for `model(params, x)`."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def drawn(shapes: dict[str, tuple[int, int]], x_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Random parameters and a batch."""
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    sizes = zip(keys, shapes.items(), strict=False)
    params = {name: jax.random.normal(key, s) / s[0] ** 0.5 for key, (name, s) in sizes}
    x = jax.random.normal(keys[-1], x_shape)
    return params, {"x": x, "y": jnp.zeros_like(x)}


def mlp(batch_size: int, width: int, num_layers: int = 4) -> tuple[Any, Any, Any]:
    """(step, state, batch) of dense layers."""

    def model(params: Any, x: Any) -> Any:
        for w in params.values():
            x = jax.nn.relu(x @ w)
        return x

    shapes = {f"w{i}": (width, width) for i in range(num_layers)}
    return trained(model), *drawn(shapes, (batch_size, width))


def transformer_block(
    batch_size: int, length: int, width: int, heads: int = 8
) -> tuple[Any, Any, Any]:
    """(step, state, batch) of one block: attention and two dense layers, with residuals."""

    def model(params: Any, x: Any) -> Any:
        q, k, v = ((x @ params[n]).reshape(*x.shape[:2], heads, -1) for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params["out"]
        return x + jax.nn.relu(x @ params["up"]) @ params["down"]

    shapes = {name: (width, width) for name in ("q", "k", "v", "out")}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    return trained(model), *drawn(shapes, (batch_size, length, width))


def show(name: str, step: Any, state: Any, batch: Any, axis: Axis) -> None:
    """Plan, print, run, and compare with one device."""
    program = trace(step, state, batch)
    sharding = choose(program, axis)
    print(f"{name}: {len(program.ops)} operators, {sharding.num_variables} variables, "
          f"communication costs {sharding.cost:.1f}")  # fmt: skip
    paths = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path((state, batch))
    ]
    for path, value in zip(paths, program.inputs, strict=True):
        print(
            f"    {path:14} {program.avals[value].str_short():16} {spec(sharding.layouts[value])}"
        )
    mesh = jax.make_mesh((axis.size,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    _, there = apply(program, sharding, mesh)(state, batch)
    _, here = jax.jit(step)(state, batch)
    print(f"    loss {float(there):.6f}, on one device {float(here):.6f}")


def main() -> None:
    axis = Axis(min(8, jax.device_count()))
    show("large batch", *mlp(batch_size=4096, width=64), axis)
    show("small batch", *mlp(batch_size=8, width=512), axis)
    show("transformer block", *transformer_block(batch_size=8, length=32, width=64), axis)

    # Ten layers of different weight, on up to eight devices. Twice the devices halve a layer's
    # work, but add communication: a layer of weight w on m devices takes w / m + 0.05 · log2 m.
    weights = [1, 1, 2, 2, 4, 4, 4, 2, 1, 1]
    table = {m: [w / m + 0.05 * np.log2(m) for w in weights] for m in (1, 2, 4, 8)}
    for num_micro_batches in (1, 8, 64):
        seconds, stages = choose_stages(table, 8, num_micro_batches)
        cut = ", ".join(f"layers {a} to {b - 1} on {m}" for a, b, m in stages)
        print(f"{num_micro_batches:2} micro-batches: {seconds:.2f} s; {cut}")


if __name__ == "__main__":
    sys.exit(main())

# On eight virtual devices it prints, among other lines:
#
# ```text
# large batch: 51 operators, 1045 variables, communication costs 1152.0
#     [0]['w0']      float32[64,64]   P()
#     loss 0.097883, on one device 0.097883
# small batch: 51 operators, 1045 variables, communication costs 863.2
#     [0]['w0']      float32[512,512] P(None, 'x')
#     [0]['w1']      float32[512,512] P('x',)
#     loss 0.061026, on one device 0.061026
#  1 micro-batches: 4.25 s; layers 0 to 9 on 8
#  8 micro-batches: 31.00 s; layers 0 to 4 on 4, layers 5 to 9 on 4
# 64 micro-batches: 216.55 s; layers 0 to 3 on 2, layers 4 to 6 on 4, layers 7 to 9 on 2
# ```
#
# ## What autopar does beyond this
#
# | here | in autopar |
# |---|---|
# | one axis | meshes of one or two axes, whose shape is searched too |
# | communication alone is priced | compute and memory traffic too, from data sheets or measured |
# | no loops | scans, `while` and `cond` are entered; layers in a scan are solved like layers |
# | memory has no bound | prices of memory, recomputation, accumulation of gradients |
# | the whole problem goes to the solver | equal layers are one decision, exact reductions first |
# | a missing rule is an error | your own rules; warnings that name the line |
# | layers and their costs are given | layers are found from data flow, costs by the solver |
# | stages are a list | programs, transfers, schedules, workers on many hosts |
#
# [Architecture](architecture.md) says how.
