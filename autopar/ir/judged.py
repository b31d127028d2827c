"""A compiled step as its schedule shows it: what the judge of programs found, kept in the plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class JudgedStep:
    """Seconds of a step on one device, read from XLA's optimized, scheduled program.

    step_s:    from the first kernel to the end of the last.
    compute_s: all kernels.
    links_s:   all collectives, as if nothing hid them.
    exposed_s: the part of them for which kernels wait.
    """

    step_s: float
    compute_s: float
    links_s: float
    exposed_s: float

    @property
    def is_sound(self) -> bool:
        """Whether a file may say so."""
        seconds = (self.step_s, self.compute_s, self.links_s, self.exposed_s)
        return all(isfinite(value) and value >= 0 for value in seconds) and self.step_s > 0
