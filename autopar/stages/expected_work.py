"""What planning a pipeline is about to take, by what it took so far: a `PlanningLog` → seconds.

Work that was done once in this plan takes as long again (`PlanningLog.took_s`). What was not is
judged by the graph of the whole step: to read it takes time in proportion to the program and to the
speed of the machine, as do cutting stages, reading their graphs, solving and assembling them.
Before anything was read, nothing is known, and 0 is returned.
"""

from __future__ import annotations

from autopar.sharding.planning_log import PlanningLog

# Kinds of work in `PlanningLog.took_s`: the step as a loop over micro-batches, its graph, what all
# its tables share, the tables of a search, and the stages of a pipeline.
LOOP, GRAPH, BENCH, TABLES, PIPELINE = "loop", "loop's graph", "bench", "tables", "pipeline"

# What these take in terms of the graph of the whole step: all stages of a pipeline, and a plan on
# one mesh. Guesses, after five large models.
_PIPELINE, _ONE_MESH = 3.0, 5.0


def solving_s(log: PlanningLog) -> float:
    """To solve the stages of a pipeline."""
    return log.took_s.get(PIPELINE) or _PIPELINE * log.took_s.get(GRAPH, 0.0)


def on_one_mesh_s(log: PlanningLog) -> float:
    """To plan the step on one mesh."""
    return _ONE_MESH * log.took_s.get(GRAPH, 0.0)


def loop_s(log: PlanningLog) -> float:
    """To trace the step at another number of micro-batches."""
    return log.took_s.get(LOOP, 0.0)


def search_again_s(log: PlanningLog, share: float) -> float:
    """To search at another number of micro-batches, with such a share of the tables."""
    shared_s = sum(log.took_s.get(kind, 0.0) for kind in (LOOP, GRAPH, BENCH))
    return shared_s + share * log.took_s.get(TABLES, 0.0)
