"""Hand-written, tuned layouts for the models of `examples.models`: autopar's competitors.

experts_for(example, num_devices, devices_per_host) → list[Expert]     all candidates
chains_for(…)                                        → list[list[Expert]]
best_of_families(chains, judge)                      → the best of each family
Expert.step(example, devices) → (jitted step, abstract state, abstract batch), with shardings
Expert.made(example, devices) → the same with arrays on the devices
Expert.plan(example, cluster) → an autopar plan, for hand-written pipelines
"""

from __future__ import annotations

from .expert import Expert
from .grid import chains_for, experts_for
from .handwritten import HandWritten
from .tuning import Judged, best_of_families

__all__ = ["Expert", "HandWritten", "Judged", "best_of_families", "chains_for", "experts_for"]
