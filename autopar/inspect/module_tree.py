"""The user's modules as a tree, with costs and parallelism: from `PlanDetails` to lines of text.

Modules are nested as their names are (`GPT/layer_0/ffn/up`). Siblings whose names differ in a
number alone, and that are alike all the way down (words, specs, names), are one line with their
count; their costs are those of all of them together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autopar.inspect.breakdown import own_plans
from autopar.inspect.lines import WIDTH, elided, number_runs
from autopar.ir.details import Parallelism
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.text import format_bytes, name_pattern, name_skeleton, wrapped

MOST_LINES = 48  # of a tree whose depth is not asked for
NAME_WIDTH = 29
FIGURES = ("compute", "comm.", "sent")
FIGURE_WIDTHS = (9, 9, 9)
WORDS_WIDTH = WIDTH - 2 - NAME_WIDTH - sum(FIGURE_WIDTHS) - 2 * len(FIGURE_WIDTHS) - 2

_KEYS = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")

UPDATE_NAME = "(update)"
NO_NAME = "(no module)"


@dataclass
class Module:
    """Sums over a module and those inside. `words`: axis -> word -> how much of it there is."""

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
            own = self.words.setdefault(axis, {})
            for word, much in words.items():
                own[word] = own.get(word, 0.0) + much
        for mine, yours in zip(self.children.values(), other.children.values(), strict=True):
            mine.add(yours)


@dataclass
class Parameter:
    name: str
    array: str
    spec: str
    words: str
    alike: int = 1  # how many of one module it stands for


def module_tree(plan: ParallelPlan) -> Module:
    """All modules of all stages, equal ones folded."""
    root = Module("")
    for own in own_plans(plan):
        tensors = {tensor.path: tensor for tensor in own.inputs}
        for row in _rows(own):
            module, compute_s, communication_s, num_bytes = row
            for at in _path(root, module):
                at.compute_s += compute_s
                at.communication_s += communication_s
                at.num_bytes += num_bytes
        for use in own.details.parallelism if own.details is not None else ():
            if use.path in tensors:
                _add_parameter(root, own, use, tensors[use.path])
        _add_words_of_products(root, own)
    _fold(root)
    return root


def tree_lines(plan: ParallelPlan, depth: int | None, cost: Callable[[float], str]) -> list[str]:
    """`depth`: how many levels of modules are shown; as many as fit, if None. `cost`: how compute
    and communication are written."""
    root = module_tree(plan)
    if not root.children:
        return []
    if depth is None:
        depth = 1
        while depth < 12 and len(list(_lines(root, depth + 1))) <= MOST_LINES:
            depth += 1
    of = ", per device of a stage" if plan.is_pipeline else ""
    title = f"modules with specs of parameters (those alike: a count, costs together{of}):"
    widths = (NAME_WIDTH, *FIGURE_WIDTHS)
    head = [("module", *FIGURES, "parallel"), tuple("-" * n for n in (*widths, WORDS_WIDTH))]
    lines = [title]
    for name, *figures, words in head:
        lines += _row(name, figures, words)
    for level, entry in _lines(root, depth):
        indent = "  " * level
        if isinstance(entry, Parameter):
            many = f" ({entry.alike})" if entry.alike > 1 else ""
            name = elided(entry.name, NAME_WIDTH - len(indent) - len(many)) + many
            spec = entry.spec.ljust(sum(FIGURE_WIDTHS) + 2 * len(FIGURE_WIDTHS) - 2)
            lines += _row(indent + name, [spec], entry.words)
            continue
        many = f" ({entry.count})" if entry.count > 1 else ""
        name = elided(entry.name, NAME_WIDTH - len(indent) - len(many)) + many
        figures = [
            cost(entry.compute_s) if entry.compute_s else "-",
            cost(entry.communication_s) if entry.communication_s else "-",
            format_bytes(entry.num_bytes) if entry.num_bytes else "-",
        ]
        said_below = depth > level + 1 or not entry.children
        words = "" if said_below and entry.parameters else words_text(entry.words)
        lines += _row(indent + name, figures, words)
    return lines


def _row(name: str, figures: list[str], words: str) -> list[str]:
    cells = figures
    if len(figures) > 1:
        pairs = zip(figures, FIGURE_WIDTHS, strict=True)
        cells = [text.rjust(width) for text, width in pairs]
    start = "  ".join((name.ljust(NAME_WIDTH), *cells)) + "  "
    first, *rest = wrapped(words, WIDTH - 2 - len(start)) or [""]
    return [f"  {start}{first}".rstrip(), *(" " * (len(start) + 2) + part for part in rest)]


# -- building


def _rows(own: ParallelPlan) -> Iterator[tuple[str, float, float, float]]:
    """(module, compute, communication, bytes sent)."""
    if own.details is None:
        for cost in own.modules:
            name = cost.module or (UPDATE_NAME if cost.region == "update" else NO_NAME)
            yield name, cost.compute_s, cost.communication_s, cost.communication_bytes
        return
    ops = own.details.ops
    sums: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    figures = (ops.compute_s, ops.communication_s, ops.communication_bytes)
    for module, region, *values in zip(ops.module, ops.region, *figures, strict=True):
        own_sums = sums[module, region]
        for position, value in enumerate(values):
            own_sums[position] += value
    for (module, region), (compute_s, communication_s, num_bytes) in sums.items():
        name = ops.strings[module]
        if not name:
            name = UPDATE_NAME if ops.strings[region] == "update" else NO_NAME
        yield name, compute_s, communication_s, num_bytes


def _path(root: Module, name: str) -> Iterator[Module]:
    """The modules on the way to one, which are made where they are not there yet."""
    yield root
    at = root
    for part in name.split("/"):
        at = at.children.setdefault(part, Module(part))
        yield at


def _add_parameter(root: Module, own: ParallelPlan, use: Parallelism, tensor: Tensor) -> None:
    size = 1.0
    for n in tensor.shape:
        size *= n
    last = root
    for at in _path(root, use.module or NO_NAME):
        last = at
        for axis, word in _used_axes(own, use):
            words = at.words.setdefault(axis, {})
            words[word] = words.get(word, 0.0) + size
    words = words_text({axis: {word: 1.0} for axis, word in _used_axes(own, use)})
    array = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    keys = _KEYS.findall(use.path.removesuffix(".value"))
    name = next(filter(None, keys[-1])) if use.module and keys else use.path
    last.parameters.append(Parameter(name, array, str(own.spec_of(tensor)), words))


def _used_axes(own: ParallelPlan, use: Parallelism) -> list[tuple[str, str]]:
    sizes = dict(zip(own.axis_names, own.mesh_shape, strict=True))
    return [(axis, word) for axis, word in use.words if sizes.get(axis, 1) > 1]


def _add_words_of_products(root: Module, own: ParallelPlan) -> None:
    """Modules without parameters go by the words of their products."""
    if own.details is None:
        return
    products: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in own.details.ops.rows():
        if row.name in ("dot_general", "conv_general_dilated") and row.region == "forward":
            products[row.module or NO_NAME][row.words] += row.flops
    told: dict[int, bool] = {}
    for module, found in products.items():
        for at in _path(root, module):
            if told.setdefault(id(at), bool(at.words)):
                continue
            for words, flops in found.items():
                for axis, word in _split_words(words, own.axis_names):
                    entry = at.words.setdefault(axis, {})
                    entry[word] = entry.get(word, 0.0) + flops


def _split_words(words: str, axes: tuple[str, ...]) -> list[tuple[str, str]]:
    """`x: data, y: tensor, column` as pairs; a word may have a comma itself."""
    found = []
    for part in words.split(", "):
        axis, _, word = part.partition(": ")
        if axis in axes and word:
            found.append((axis, word))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}, {part}")
    return found


# -- folding


def _fold(module: Module) -> None:
    """Children that are alike become one, from the leaves on; so do parameters."""
    for child in module.children.values():
        _fold(child)
    uses: dict[tuple, list[Parameter]] = defaultdict(list)
    for own in module.parameters:
        uses[name_skeleton(own.name), own.array, own.spec, own.words].append(own)
    module.parameters = [
        replace(found[0], name=name_pattern([own.name for own in found]), alike=len(found))
        for found in uses.values()
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
    parameters = tuple((p.name, p.array, p.spec, p.words, p.alike) for p in module.parameters)
    children = tuple(
        (name_skeleton(child.name), child.count, _signature(child))
        for child in module.children.values()
    )
    return words, parameters, children


def _folded_name(names: list[str]) -> str:
    """layer_0–23 where one number differs, else `*` for those that do."""
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
    """`x: data; y: tensor column / row`: the words of each axis, the most frequent first. Axes
    with the same words are said together."""
    axes: dict[str, list[str]] = defaultdict(list)
    for axis, own in words.items():
        ordered = sorted(own, key=lambda word: -own[word])
        shown = [word.replace(", ", " ") for word in ordered[:3]]
        for position, word in enumerate(shown[1:], 1):  # tensor column / tensor row
            first, _, last = word.partition(" ")
            if last and shown[0].startswith(f"{first} ") and "+" not in word:
                shown[position] = last
        text = " / ".join(shown) + (" / …" if len(ordered) > 3 else "")
        axes[text].append(axis)
    return "; ".join(f"{' and '.join(names)}: {text}" for text, names in axes.items())
