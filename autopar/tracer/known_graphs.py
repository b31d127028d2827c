"""Graphs of the steps that were looked at last: from a `TracedStep` to its `Graph`, built once.

Searches come back to a step: for other meshes, for its memory alone, for tables of its layers.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.devices import INSTRUCTIONS_PER_BYTE
from autopar.ir.graph import Graph
from autopar.ir.traced_step import TracedStep
from autopar.tracer.build import build_graph

_MOST = 4  # graphs of large programs take some hundred MB


class KnownGraphs:
    """The last few graphs, by the very step that they are of."""

    def __init__(self) -> None:
        self._built: dict[tuple[int, bool, float, bool], tuple[TracedStep, Graph]] = {}

    def of(
        self,
        step: TracedStep,
        *,
        overlaps: bool = True,
        instructions_per_byte: float = INSTRUCTIONS_PER_BYTE,
        in_stages: bool = False,
    ) -> Graph:
        """The step's graph, as `build_graph` makes it; `in_stages`: as one whose stages run."""
        key = id(step), overlaps, instructions_per_byte, in_stages
        known = self._built.pop(key, None)
        if known is None:  # a step that is kept keeps its id
            rate = instructions_per_byte
            built = replace(step, is_stage=True) if in_stages else step
            known = step, build_graph(built, overlaps=overlaps, instructions_per_byte=rate)
        self._built[key] = known
        while len(self._built) > _MOST:
            del self._built[next(iter(self._built))]
        return known[1]
