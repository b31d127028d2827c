"""Module names for programs without any: from a `Graph` and the paths of parameters to a `Graph`.

Flax modules write their names on their equations; plain JAX code, and modules that are plain
objects, do not. Then an op that uses a parameter, or makes its gradient, is named by the
parameter's path in the state (`layers[3]/ffn/up`), and any other op by the common prefix of the
named ops before and after it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.cost.roles import Roles
from autopar.ir.graph import Graph, NodeKind
from autopar.tracer.regions import UPDATE

_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.?([A-Za-z_]\w*)")
_Place = tuple[str, ...]


def with_module_names(graph: Graph, roles: Roles) -> Graph:
    """The graph with module names; the same graph if its program has them."""
    uses = [graph.nodes[readers[0].node] for readers in roles.readers.values()]
    if not uses or any(node.module and "->" not in node.module for node in uses):
        return graph
    places = _places(graph, roles)
    known: list[_Place | None] = [None] * len(graph.nodes)
    regions: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        if node.kind is not NodeKind.OP or node.region == UPDATE:
            continue
        regions.setdefault(node.region, []).append(index)
        for value in (*node.operands, *node.results):
            origin = roles.made_of.get(value) or roles.gradient_of.get(value)
            if origin is not None:
                known[index] = places[origin[0]]
                break
    place_of = dict(enumerate(known))
    for members in regions.values():
        before: _Place | None = None
        after = _next_known(known, members)
        for index in members:
            before = known[index] or before
            if known[index] is None and before is not None and after[index] is not None:
                place_of[index] = _common(before, after[index] or ())
    nodes = tuple(
        replace(node, module="/".join((*place, *filter(None, (node.module,))))) if place else node
        for node, place in zip(graph.nodes, place_of.values(), strict=True)
    )
    return replace(graph, nodes=nodes)


def _next_known(known: list[_Place | None], members: list[int]) -> dict[int, _Place | None]:
    after: dict[int, _Place | None] = {}
    last: _Place | None = None
    for index in reversed(members):
        after[index] = last
        last = known[index] or last
    return after


def _places(graph: Graph, roles: Roles) -> dict[int, _Place]:
    """{parameter: the names around it in the state, without the prefix that all share}."""
    names_of = {p: _names(graph.values[p].path or "") for p in roles.parameters}
    shared = _common(*names_of.values()) if len(names_of) > 1 else ()
    return {p: names[len(shared) : -1] for p, names in names_of.items()}


def _names(path: str) -> _Place:
    """`state.params['layers'][3]['up'].value` as (state, params, layers[3], up)."""
    names: list[str] = []
    for key, number, attribute in _KEY.findall(path):
        if number and names:
            names[-1] += f"[{number}]"
        else:
            names.append(key or number or attribute)
    return tuple(names[:-1] if names[-1:] == ["value"] else names)


def _common(*places: _Place) -> _Place:
    shared = []
    for names in zip(*places, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return tuple(shared)
