"""Module names for programs without any: from a `Graph` and the paths of parameters to a `Graph`.

Flax modules write their names on their equations. Plain JAX code does not, and Equinox writes the
class of a layer (`eqx.nn.Linear`), which all of them share. Then an op that uses a parameter, or
makes its gradient, is named by the parameter's path in the state (`layers[3]/ffn/up`), and any
other op by the common prefix of the named ops before and after it.
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
    module_of = {p: graph.nodes[readers[0].node].module for p, readers in roles.readers.items()}
    places = _places(graph, roles)
    shared = _shared_names(graph, module_of, places)
    if not module_of or any(m and "->" not in m and m not in shared for m in module_of.values()):
        return graph
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
    nodes = []
    for node, place in zip(graph.nodes, place_of.values(), strict=True):
        own = (node.module,) if node.module and node.module not in shared else ()
        nodes.append(node.having(module="/".join((*place, *own))) if place else node)
    return replace(graph, nodes=tuple(nodes))


def _shared_names(
    graph: Graph, module_of: dict[int, str], places: dict[int, _Place]
) -> frozenset[str]:
    """Names that stand for several modules: parameters of one key and different places have them.
    A module's own parameters have different keys."""
    found: dict[tuple[str, str], set[_Place]] = {}
    for parameter, module in module_of.items():
        key = (_names(graph.values[parameter].path or "") or ("",))[-1]
        found.setdefault((module, key), set()).add(places.get(parameter, ()))
    return frozenset(module for (module, _), where in found.items() if module and len(where) > 1)


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
