"""Why an array is sharded as it is: its neighbours, and what other layouts would cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Neighbour:
    """An operator that makes or reads the array. `layout` is how it makes or reads it, `strategy`
    the layouts of all its operands and results; `seconds` what resharding between the array's
    layout and this one takes per step, by `steps` such as `all-gather(x)`."""

    role: str  # "made by", "read by", …
    operator: str
    module: str
    region: str
    layout: str
    strategy: str
    seconds: float
    steps: tuple[str, ...]
    runs: float = 1.0  # per step


@dataclass(frozen=True)
class Alternative:
    """A layout that the array could have, and the best plan with it. Seconds are per step.

    producer_s:  of the operator that makes the array.
    reshard_s:   of resharding between the array, with all equivalent ones, and its neighbours.
    step_s:      of the best plan with this layout, or of its stage. A lower bound if `is_bound`;
                 infinite if no plan has this layout.
    fits:        whether that plan stays within the memory budget.
    gap:         optimality gap; 0 if proven optimal.
    changes:     (collective, how many more per step than in the plan).
    extra_bytes: sent per device and step, compared with the plan.
    """

    spec: str
    words: str
    is_chosen: bool
    producer_s: float = 0.0
    reshard_s: float = 0.0
    step_s: float = inf
    is_bound: bool = False
    peak_bytes: float = 0.0
    fits: bool = True
    gap: float = 0.0
    changes: tuple[tuple[str, int], ...] = ()
    extra_bytes: float = 0.0


@dataclass(frozen=True)
class Why:
    """paths:   the arrays that the user named.
    equivalent_paths: arrays of equal layers, which always have the same layout.
    kind:    "input", "output" or "named value", and its role.
    reason:  the array's parallelism, in the plan's words; may be empty.
    pinned:  what in the user's options or pins asks for this layout.
    stage:   of a pipeline.
    """

    paths: tuple[str, ...]
    equivalent_paths: tuple[str, ...]
    kind: str
    array: str
    spec: str
    words: str
    mesh: str
    step_s: float
    peak_bytes: float
    neighbours: tuple[Neighbour, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    reason: str = ""
    pinned: str = ""
    stage: int | None = None
    budget_bytes: float = inf
    is_timed: bool = True  # else costs are in the units of the mesh
    notes: tuple[str, ...] = ()
    seconds: float = 0.0  # spent on the answer
