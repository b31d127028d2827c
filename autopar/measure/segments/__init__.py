"""Segments of a model: from a step to a plan made of measured parts.

Segments are cut out of the step, compiled and timed under their leading combinations of
strategies, and put together by an exact search over what was measured.

    prepare_step, run_passes   the three passes, by their files (`passes`)
    analyse                    a step → its segments and their spaces (`analysing`)
    profile_segments           combinations timed on devices (`profiling`)
    search                     measured times → a plan (`searching`)
"""

from autopar.measure.segments.analyse import PreparedStep, analyse
from autopar.measure.segments.passes import PASSES, prepare_step, run_passes
from autopar.measure.segments.profile import TimingTask, profile_segments
from autopar.measure.segments.search_segments import SearchResult, search

__all__ = [
    "PASSES",
    "PreparedStep",
    "SearchResult",
    "TimingTask",
    "analyse",
    "prepare_step",
    "profile_segments",
    "run_passes",
    "search",
]
