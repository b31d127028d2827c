"""Graphs of the steps that were looked at last: from a `TracedStep` to its `Graph`, built once.

Searches come back to a step: for other meshes, for its memory alone, for tables of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.ir.devices import INSTRUCTIONS_PER_BYTE
from autopar.ir.graph import Graph
from autopar.ir.traced_step import TracedStep
from autopar.tracer.build import BuiltGraph, build

_MOST = 4  # graphs of large programs take some hundred MB


@dataclass
class _Known:
    """The graphs of a step, as a stage and not; `built`: of what another is made, of the step that
    was built last."""

    step: TracedStep  # a step that is kept keeps its id
    graphs: dict[bool, Graph] = field(default_factory=dict)
    built: BuiltGraph | None = None


class KnownGraphs:
    """The last few graphs, by the very step that they are of."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool, float], _Known] = {}

    def of(
        self,
        step: TracedStep,
        *,
        overlaps: bool = True,
        instructions_per_byte: float = INSTRUCTIONS_PER_BYTE,
        in_stages: bool = False,
    ) -> Graph:
        """The step's graph, as `build_graph` makes it; `in_stages`: as one whose stages run."""
        key = id(step), overlaps, instructions_per_byte
        known = self._known.pop(key, None) or _Known(step)
        is_stage = in_stages or step.is_stage
        if is_stage not in known.graphs:
            if known.built is None:
                for other in self._known.values():
                    other.built = None
                as_run = step if is_stage == step.is_stage else replace(step, is_stage=is_stage)
                known.built = build(as_run, overlaps, instructions_per_byte)
                known.graphs[is_stage] = known.built.graph
            else:
                known.graphs[is_stage] = known.built.run_as(is_stage)
        self._known[key] = known
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        return known.graphs[is_stage]
