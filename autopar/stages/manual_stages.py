"""Checks of `ManualStages`: from layer ids and the number of layers to an error, or none."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ArgumentError, shortened


def check_layer_ids(layer_ids: Sequence[Sequence[int]], num_layers: int) -> None:
    flat = [layer for ids in layer_ids for layer in ids]
    if flat == list(range(num_layers)) and all(layer_ids):
        return
    given = f"ManualStages(layer_ids={shortened(layer_ids)})"
    beyond = sorted({layer for layer in flat if not 0 <= layer < num_layers})
    missing = sorted(set(range(num_layers)) - set(flat))
    if beyond:
        wrong = f"there is no layer {beyond[0]}: the step has {num_layers} layers, from 0 on"
    elif missing:
        wrong = f"no stage has layer {missing[0]}: the step has {num_layers} layers, from 0 on"
    elif not all(layer_ids):
        wrong = "a stage has no layer"
    else:
        wrong = "layers are given twice or out of order"
    raise ArgumentError(
        f"{given}: {wrong}. Give every layer to one stage, in order, such as [[0, 1], [2, 3]]; "
        "autopar.AutoLayers(n) sets the number of layers."
    )
