"""Memory as XLA counts it: what compiling a plan found, and what the next plan learns from it.

The arguments of a step have the same bytes in a plan and in XLA. Everything else (activations,
gradients, temporaries, copies) is predicted, and a program that recomputes layers errs otherwise
than one that keeps their activations. So a correction has one factor for each of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MemoryCorrection:
    """What XLA was found to keep beside a step's arguments, over what was predicted.

    kept:       of programs that recompute nothing.
    recomputed: of programs that recompute layers.
    """

    kept: float = 1.0
    recomputed: float = 1.0

    def factor(self, recomputes: bool) -> float:
        return self.recomputed if recomputes else self.kept

    def times(self, factor: float, recomputes: bool | None = None) -> MemoryCorrection:
        """With one of the factors multiplied, or both."""
        if recomputes is None:
            return MemoryCorrection(self.kept * factor, self.recomputed * factor)
        new = self.factor(recomputes) * factor
        return replace(self, recomputed=new) if recomputes else replace(self, kept=new)


@dataclass(frozen=True)
class MemoryFound:
    """A plan's memory beside XLA's.

    compiled_bytes: XLA's peak bytes per device, by mesh.
    limit_bytes:    what a device has for the step; None for no limit.
    replanned:      why earlier plans of the step were given up, a sentence each.
    """

    compiled_bytes: tuple[float, ...]
    limit_bytes: float | None = None
    replanned: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> float:
        """Of the fullest device."""
        return max(self.compiled_bytes)
