"""How much to recompute: layers → rungs, each of which frees more memory than the one below.

Rung 0 recomputes nothing. Parts of layers come first, which cost least for what they free
(`rewrite.partial_remat`), then whole layers in their place; both from the front, where activations
would be kept longest. The last rung recomputes all layers whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.rewrite.layers import Layer


class RematLadder:
    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self._with_parts = [n for n, layer in enumerate(self.layers) if layer.part is not None]
        self.top = len(self._with_parts) + len(self.layers)

    def layers_at(self, rung: int) -> tuple[Layer, ...]:
        """Layers, and parts of layers, that this rung recomputes."""
        num_whole = max(0, rung - len(self._with_parts))
        parts = [self.layers[n].part for n in self._with_parts[:rung] if n >= num_whole]
        return (*self.layers[:num_whole], *(part for part in parts if part is not None))

    def flops(self, rung: int) -> float:
        return sum(layer.flops for layer in self.layers_at(rung))

    def freed_bytes(self, rung: int) -> int:
        """Of the whole batch, before any sharding."""
        return sum(layer.freed_bytes for layer in self.layers_at(rung))

    def rung_that_frees(self, num_bytes: float) -> int:
        """The first that frees so much; the last if none does."""
        found = (rung for rung in range(self.top) if self.freed_bytes(rung) >= num_bytes)
        return next(found, self.top)
