"""Steps that nobody had measured or planned when they were written: names → functions of rows.

`UNSEEN` has, per name, a function from a batch size to a `ZooStep`, the batch for one H200, and the
arguments of its tiny form. They are plain JAX with optimizers of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.judge_h200.unseen import (
    actors,
    audio,
    detectors,
    images,
    languages,
    points,
    science,
    sequences,
    tables,
    tuned,
)
from tests.zoo.program import ZooStep

Unseen = tuple[Callable[..., ZooStep], int, dict[str, Any]]

UNSEEN: dict[str, Unseen] = {
    "whisper": (
        audio.whisper,
        16,
        {"width": 32, "heads": 2, "frames": 32, "length": 8, "vocabulary": 65},
    ),
    "efficientnet": (images.efficientnet, 64, {"size": 32, "width": 8}),
    "set detector": (
        detectors.set_detector,
        16,
        {"size": 64, "width": 32, "queries": 8, "objects": 3},
    ),
    "gated large vocabulary": (
        languages.soft_capped,
        2,
        {"width": 32, "heads": 2, "inner": 64, "length": 16, "vocabulary": 128},
    ),
    "latent attention, shared experts": (
        languages.latent_experts,
        4,
        {"width": 32, "heads": 2, "length": 16, "vocabulary": 64, "experts": 4, "chosen": 2},
    ),
    "chunked state space": (
        sequences.state_space,
        4,
        {"width": 32, "head": 16, "state": 8, "length": 32, "chunk": 8, "vocabulary": 64},
    ),
    "waveforms": (audio.waveforms, 12, {"width": 32, "heads": 2, "samples": 3200, "channels": 16}),
    "style generator": (images.style_generator, 16, {"top": 16, "size": 16}),
    "point clouds": (points.point_clouds, 32, {"num_points": 32, "k": 4}),
    "cross network": (tables.cross_network, 65536, {"ids": 50, "width": 4, "deep": 16}),
    "dual encoder": (
        tables.dual_encoder,
        1024,
        {"width": 32, "heads": 2, "length": 8, "vocabulary": 64},
    ),
    "triangle attention": (
        science.triangles,
        1,
        {"residues": 8, "sequences": 4, "pair": 16, "wide": 16},
    ),
    "recurrent speech": (audio.recurrent_speech, 32, {"frames": 8, "labels": 3, "width": 16}),
    "world model": (actors.world_model, 16, {"time": 4, "width": 16, "channels": 4}),
    "random features": (
        sequences.random_features,
        8,
        {"width": 32, "heads": 2, "length": 32, "features": 8},
    ),
    "forces of atoms": (science.forces, 4096, {"neighbours": 4, "channels": 8}),
    "sampled neighbours": (points.sampled_neighbours, 4096, {"nodes": 50, "features": 10}),
    "sequential recommender": (
        tables.sequential_recommender,
        512,
        {"items": 100, "length": 8, "width": 16},
    ),
    "exact vit": (images.exact_vit, 64, {"width": 32, "heads": 2, "depth": 1}),
    "tabular": (tables.tabular, 65536, {"width": 16, "depth": 1}),
    "video attention": (images.video_attention, 12, {"width": 32, "heads": 2, "size": 32}),
    "proteins": (languages.proteins, 4, {"width": 32, "heads": 2, "length": 16}),
    "focal detector": (detectors.focal_detector, 16, {"size": 64, "width": 16}),
    "quantized base": (
        tuned.quantized_base,
        4,
        {"width": 64, "heads": 2, "inner": 128, "length": 16, "vocabulary": 64},
    ),
    "preferences": (
        tuned.preferences,
        4,
        {"width": 32, "heads": 2, "length": 16, "vocabulary": 64},
    ),
    "super-resolution": (images.super_resolution, 16, {"channels": 8, "blocks": 1, "size": 8}),
    "audio codec": (audio.codec, 64, {"samples": 640, "channels": 4, "codes": 8}),
    "actor and critics": (actors.actor_and_critics, 256, {"updates": 2, "width": 16}),
    "skip-gram": (tables.skip_gram, 65536, {"words": 100, "width": 8}),
    "solver in the loop": (science.solver, 8, {"size": 16, "steps": 2, "channels": 4}),
}
