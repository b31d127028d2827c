"""The user's modules as a tree, with costs and parallelism: from `PlanDetails` to lines of text.

Modules are nested as their names are (`GPT/layer_0/ffn/up`). Siblings whose names differ only in a
number, with the same parallelism and specs all the way down, are folded into one line with their
count and total cost.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from autopar.inspect.breakdown import mesh_plans
from autopar.inspect.lines import WIDTH, elided, number_runs
from autopar.ir.details import Parallelism
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.text import format_bytes, name_pattern, name_skeleton, wrapped

MOST_LINES = 48  # of a tree without a given depth
NAME_WIDTH = 29
COSTS = ("compute", "comm.", "sent")
COST_WIDTHS = (9, 9, 9)
WORDS_WIDTH = WIDTH - 2 - NAME_WIDTH - sum(COST_WIDTHS) - 2 * len(COST_WIDTHS) - 2

_KEYS = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")

UPDATE_NAME = "(update)"
NO_NAME = "(no module)"


@dataclass
class Module:
    """Sums over a module and its submodules. `words`: axis -> parallelism -> its weight."""

    name: str
    count: int = 1
    compute_s: float = 0.0
    communication_s: float = 0.0
    num_bytes: float = 0.0
    words: dict[str, dict[str, float]] = field(default_factory=dict)
    parameters: list[Parameter] = field(default_factory=list)
    children: dict[str, Module] = field(default_factory=dict)

    def add(self, other: Module) -> None:
        self.count += other.count
        self.compute_s += other.compute_s
        self.communication_s += other.communication_s
        self.num_bytes += other.num_bytes
        for axis, words in other.words.items():
            sums = self.words.setdefault(axis, {})
            for word, weight in words.items():
                sums[word] = sums.get(word, 0.0) + weight
        for child, twin in zip(self.children.values(), other.children.values(), strict=True):
            child.add(twin)


@dataclass
class Parameter:
    name: str
    array: str
    spec: str
    words: str
    count: int = 1  # of folded parameters in one module


def module_tree(plan: ParallelPlan) -> Module:
    """All modules of all stages, folded."""
    root = Module("")
    for mesh_plan in mesh_plans(plan):
        tensors = {tensor.path: tensor for tensor in mesh_plan.inputs}
        for module, compute_s, communication_s, num_bytes in _rows(mesh_plan):
            for at in _path(root, module):
                at.compute_s += compute_s
                at.communication_s += communication_s
                at.num_bytes += num_bytes
        for use in mesh_plan.details.parallelism if mesh_plan.details is not None else ():
            if use.path in tensors:
                _add_parameter(root, mesh_plan, use, tensors[use.path])
        _add_product_words(root, mesh_plan)
    _fold(root)
    return root


def tree_lines(
    plan: ParallelPlan,
    depth: int | None,
    cost: Callable[[float], str],
    *,
    most: int = MOST_LINES,
    parameters: bool = True,
) -> list[str]:
    """`depth`: levels of modules; None for as many as fit into `most` lines. `cost`: formats
    compute and communication. `parameters`: with those and their specs."""
    root = module_tree(plan)
    if not parameters:
        _forget_parameters(root)
    if not root.children:
        return []
    if depth is None:
        depth = 1
        while depth < 12 and len(list(_lines(root, depth + 1))) <= most:
            depth += 1
    each = ", per device of a stage" if plan.is_pipeline else ""
    what = "modules and parameter specs" if parameters else "modules"
    title = f"{what} (equal layers folded, with count and total cost{each}):"
    widths = (NAME_WIDTH, *COST_WIDTHS)
    head = [("module", *COSTS, "parallelism"), tuple("-" * n for n in (*widths, WORDS_WIDTH))]
    lines = [title]
    for name, *cells, words in head:
        lines += _row(name, cells, words)
    for level, entry in _lines(root, depth):
        indent = "  " * level
        count = f" ({entry.count})" if entry.count > 1 else ""
        name = indent + elided(entry.name, NAME_WIDTH - len(indent) - len(count)) + count
        if isinstance(entry, Parameter):
            spec = entry.spec.ljust(sum(COST_WIDTHS) + 2 * len(COST_WIDTHS) - 2)
            lines += _row(name, [spec], entry.words)
            continue
        cells = [
            cost(entry.compute_s) if entry.compute_s else "-",
            cost(entry.communication_s) if entry.communication_s else "-",
            format_bytes(entry.num_bytes) if entry.num_bytes else "-",
        ]
        shows_parameters = entry.parameters and (depth > level + 1 or not entry.children)
        lines += _row(name, cells, "" if shows_parameters else words_text(entry.words))
    return lines


def _forget_parameters(module: Module) -> None:
    module.parameters.clear()
    for child in module.children.values():
        _forget_parameters(child)


def _row(name: str, cells: list[str], words: str) -> list[str]:
    """`cells`: the costs, or one spec in their place."""
    if len(cells) > 1:
        cells = [text.rjust(width) for text, width in zip(cells, COST_WIDTHS, strict=True)]
    start = "  ".join((name.ljust(NAME_WIDTH), *cells)) + "  "
    first, *rest = wrapped(words, WIDTH - 2 - len(start)) or [""]
    return [f"  {start}{first}".rstrip(), *(" " * (len(start) + 2) + part for part in rest)]


# -- building


def _rows(plan: ParallelPlan) -> Iterator[tuple[str, float, float, float]]:
    """(module, compute, communication, bytes sent)."""
    if plan.details is None:
        for cost in plan.modules:
            name = cost.module or (UPDATE_NAME if cost.region == "update" else NO_NAME)
            yield name, cost.compute_s, cost.communication_s, cost.communication_bytes
        return
    ops = plan.details.ops
    sums: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    costs = (ops.compute_s, ops.communication_s, ops.communication_bytes)
    for module, region, *values in zip(ops.module, ops.region, *costs, strict=True):
        module_sums = sums[module, region]
        for position, value in enumerate(values):
            module_sums[position] += value
    for (module, region), (compute_s, communication_s, num_bytes) in sums.items():
        name = ops.strings[module]
        if not name:
            name = UPDATE_NAME if ops.strings[region] == "update" else NO_NAME
        yield name, compute_s, communication_s, num_bytes


def _path(root: Module, name: str) -> Iterator[Module]:
    """The modules on the path to one, created where missing."""
    yield root
    at = root
    for part in name.split("/"):
        at = at.children.setdefault(part, Module(part))
        yield at


def _add_parameter(root: Module, plan: ParallelPlan, use: Parallelism, tensor: Tensor) -> None:
    size = float(prod(tensor.shape)) / (1 + len(use.layers or ()))
    words = words_text({axis: {word: 1.0} for axis, word in _used_axes(plan, use)})
    array = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    keys = _KEYS.findall(use.path.removesuffix(".value"))
    name = next(filter(None, keys[-1])) if use.module and keys else use.path
    spec = str(plan.spec_of(tensor))
    for module in (use.module or NO_NAME, *(use.layers or ())):
        last = root
        for at in _path(root, module):
            last = at
            for axis, word in _used_axes(plan, use):
                sums = at.words.setdefault(axis, {})
                sums[word] = sums.get(word, 0.0) + size
        last.parameters.append(Parameter(name, array, spec, words))


def _used_axes(plan: ParallelPlan, use: Parallelism) -> list[tuple[str, str]]:
    sizes = dict(zip(plan.axis_names, plan.mesh_shape, strict=True))
    return [(axis, word) for axis, word in use.words if sizes.get(axis, 1) > 1]


def _add_product_words(root: Module, plan: ParallelPlan) -> None:
    """Modules without parameters get the parallelism of their matrix products."""
    if plan.details is None:
        return
    products: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in plan.details.ops.rows():
        if row.name in ("dot_general", "conv_general_dilated") and row.region == "forward":
            products[row.module or NO_NAME][row.words] += row.flops
    has_words: dict[int, bool] = {}  # before any product was added
    for module, flops_of in products.items():
        for at in _path(root, module):
            if has_words.setdefault(id(at), bool(at.words)):
                continue
            for words, flops in flops_of.items():
                for axis, word in _split_words(words, plan.axis_names):
                    entry = at.words.setdefault(axis, {})
                    entry[word] = entry.get(word, 0.0) + flops


def _split_words(words: str, axes: tuple[str, ...]) -> list[tuple[str, str]]:
    """`x: data, y: tensor, column` as pairs; a word may contain a comma."""
    pairs: list[tuple[str, str]] = []
    for part in words.split(", "):
        axis, _, word = part.partition(": ")
        if axis in axes and word:
            pairs.append((axis, word))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]}, {part}")
    return pairs


# -- folding


def _fold(module: Module) -> None:
    """Fold equal children, from the leaves up, and equal parameters."""
    for child in module.children.values():
        _fold(child)
    uses: dict[tuple, list[Parameter]] = defaultdict(list)
    for parameter in module.parameters:
        skeleton = name_skeleton(parameter.name)
        uses[skeleton, parameter.array, parameter.spec, parameter.words].append(parameter)
    module.parameters = [
        replace(members[0], name=name_pattern([p.name for p in members]), count=len(members))
        for members in uses.values()
    ]
    groups: dict[tuple, list[Module]] = defaultdict(list)
    for child in module.children.values():
        groups[name_skeleton(child.name), _signature(child)].append(child)
    module.children = {}
    for members in groups.values():
        first = members[0]
        module.children[first.name] = first
        first.name = _folded_name([member.name for member in members])
        for other in members[1:]:
            first.add(other)


def _signature(module: Module) -> tuple:
    words = tuple((axis, frozenset(words)) for axis, words in sorted(module.words.items()))
    parameters = tuple((p.name, p.array, p.spec, p.words, p.count) for p in module.parameters)
    children = tuple(
        (name_skeleton(child.name), child.count, _signature(child))
        for child in module.children.values()
    )
    return words, parameters, children


def _folded_name(names: list[str]) -> str:
    """`layer_0–23` if one number differs, else `*` for each that does."""
    pattern = name_pattern(names)
    if len(names) > 1 and pattern.count("*") == 1:
        before, _, after = pattern.partition("*")
        end = len(after)
        numbers = [name[len(before) : len(name) - end] for name in names]
        if all(number.isdigit() for number in numbers):
            runs = number_runs([int(number) for number in numbers]).split(", ")
            return before + ", ".join(runs[:2] + ["…"] * (len(runs) > 2)) + after
    return pattern


# -- lines


def _lines(module: Module, depth: int, level: int = 0) -> Iterator[tuple[int, Module | Parameter]]:
    for child in sorted(module.children.values(), key=_is_unnamed):
        yield level, child
        if level + 1 < depth:
            for parameter in child.parameters:
                yield level + 1, parameter
            yield from _lines(child, depth, level + 1)
        elif not child.children:
            for parameter in child.parameters:
                yield level + 1, parameter


def _is_unnamed(module: Module) -> bool:
    return module.name in (UPDATE_NAME, NO_NAME)


def words_text(words: dict[str, dict[str, float]]) -> str:
    """`x: data; y: tensor column / row`: the parallelism of each axis, the most frequent first.
    Axes of the same parallelism are listed together."""
    axes: dict[str, list[str]] = defaultdict(list)
    for axis, weights in words.items():
        ordered = sorted(weights, key=lambda word: -weights[word])
        shown = [word.replace(", ", " ") for word in ordered[:3]]
        for position, word in enumerate(shown[1:], 1):  # tensor column / tensor row
            first, _, last = word.partition(" ")
            if last and shown[0].startswith(f"{first} ") and "+" not in word:
                shown[position] = last
        text = " / ".join(shown) + (" / …" if len(ordered) > 3 else "")
        axes[text].append(axis)
    return "; ".join(f"{' and '.join(names)}: {text}" for text, names in axes.items())
