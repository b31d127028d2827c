"""Side constraints of the solver: a `Limit` is a linear function of the choice, such as memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.sharding.reduce import PairwiseProblem


@dataclass(frozen=True, eq=False)
class Limit:
    """A linear function of a choice: terms per node, terms per edge (u < v), and a constant."""

    nodes: Mapping[int, np.ndarray]
    edges: Mapping[tuple[int, int], np.ndarray]
    constant: float = 0.0

    def value(self, choice: Mapping[int, int]) -> float:
        total = self.constant + sum(float(t[choice[u]]) for u, t in self.nodes.items())
        return total + sum(float(t[choice[u], choice[v]]) for (u, v), t in self.edges.items())

    def floor(self) -> float:
        """A lower bound over all choices."""
        terms = (*self.nodes.values(), *self.edges.values())
        return self.constant + sum(float(t.min()) for t in terms)

    def add_to(self, problem: PairwiseProblem, price: float) -> None:
        """Add the function, times a price, to a problem's costs."""
        for u, term in self.nodes.items():
            problem.costs[u] = problem.costs[u] + price * term
        for (u, v), term in self.edges.items():
            problem.add_edge(u, v, price * term)

    def restrict(self, kept: Mapping[int, np.ndarray]) -> Limit:
        """The same function over fewer strategies. Terms of a node with one strategy move to its
        neighbour, or to the constant, as do those that are the same for all of its strategies."""
        nodes: dict[int, np.ndarray] = {}
        edges: dict[tuple[int, int], np.ndarray] = {}
        constant = self.constant

        def add(u: int, term: np.ndarray) -> None:
            nonlocal constant
            if len(term) == 1:
                constant += float(term[0])
            else:
                nodes[u] = nodes[u] + term if u in nodes else term

        for u, term in self.nodes.items():
            add(u, term[kept[u]])
        for (u, v), term in self.edges.items():
            part = term[np.ix_(kept[u], kept[v])]
            if part.shape[0] == 1:
                add(v, part[0])
            elif part.shape[1] == 1:
                add(u, part[:, 0])
            elif part.any():
                edges[u, v] = part
        same = [u for u, term in nodes.items() if np.ptp(term) == 0]
        constant += sum(float(nodes.pop(u)[0]) for u in same)
        return Limit(nodes, edges, constant)

    @property
    def ends(self) -> set[int]:
        """The nodes on whose strategies it depends."""
        return {*self.nodes, *(u for edge in self.edges for u in edge)}
