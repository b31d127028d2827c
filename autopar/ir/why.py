"""Why an array lies as it does, as data: its neighbours, and what other layouts would cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Neighbour:
    """An operator that makes or reads the array. `layout` is how it makes or reads it, `strategy`
    all its operands and results; `seconds` what it takes per step to get the array from where it
    lies to there, by `steps`, such as `all-gather(x)`."""

    role: str  # "made by", "read by", "read by, after its next value is made", …
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

    own_s:      of the operator that makes the array itself.
    moving_s:   of resharding between it and the neighbours that are listed, of all arrays alike.
    step_s:     of the best plan with this layout; of a stage, its share. If `is_bound`, it takes at
                least so long; infinite if there is no plan with it.
    fits:       whether that plan stays within the memory budget.
    gap:        how far from the best with this layout it may be; 0 if it is proven to be that.
    changes:    (collective, how many more a step has than the plan at hand).
    more_bytes: sent per device and step, against the plan at hand.
    """

    spec: str
    words: str
    is_chosen: bool
    own_s: float = 0.0
    moving_s: float = 0.0
    step_s: float = inf
    is_bound: bool = False
    peak_bytes: float = 0.0
    fits: bool = True
    gap: float = 0.0
    changes: tuple[tuple[str, int], ...] = ()
    more_bytes: float = 0.0


@dataclass(frozen=True)
class Why:
    """paths:   the arrays that were asked for.
    alike:   others that are treated as these are: equal layers, which move with them.
    kind:    "input", "output" or "named value", and its role.
    reason:  what the array is, in the words of the whole plan; empty if the plan has none.
    pinned:  what asks for this layout, if the user does.
    stage:   that holds it, in a pipeline.
    """

    paths: tuple[str, ...]
    alike: tuple[str, ...]
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
    seconds: float = 0.0  # that it took to find out
