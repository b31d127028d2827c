"""How a pipeline's layers were found, so that they can be found again from the plan's file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autopar.ir.codec import Stored

_FOLLOWING = "following "  # prefix in files


class LayerSource(Enum):
    """What made the layers; values are those of plan files."""

    AUTO = "auto"  # `AutoLayers`
    MANUAL = "manual"  # `ManualLayers`
    BY_ARGUMENTS = "held"  # a layer per stage: the work on the arguments that the stage holds
    PER_STAGE_OUTPUTS = "made"  # each stage computes its own results, and nothing is sent


@dataclass(frozen=True)
class Layering:
    """num_layers:   asked of `AutoLayers`; None where it chose the number.
    is_following: the step's stages are those of another step, which it follows.
    """

    source: LayerSource
    num_layers: int | None = None
    is_following: bool = False

    def __str__(self) -> str:
        """As in plan files: `auto`, `8`, `following held`."""
        layers = self.source.value if self.num_layers is None else str(self.num_layers)
        return (_FOLLOWING if self.is_following else "") + layers


BY_ARGUMENTS = Layering(LayerSource.BY_ARGUMENTS)
PER_STAGE_OUTPUTS = Layering(LayerSource.PER_STAGE_OUTPUTS)


def parse_layering(text: str) -> Layering | None:
    """From a plan file; None from a plan without a pipeline."""
    if not text:
        return None
    layers, is_following = text.removeprefix(_FOLLOWING), text.startswith(_FOLLOWING)
    if layers.isdecimal():
        return Layering(LayerSource.AUTO, int(layers), is_following)
    return Layering(LayerSource(layers), None, is_following)


STORED_LAYERING = Stored(str, write=lambda layering: str(layering or ""), read=parse_layering)
