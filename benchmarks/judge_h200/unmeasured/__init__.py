"""Steps that nobody had measured or planned when they were written: names → functions of rows.

`UNMEASURED` has, per name, a function from a batch size to a `ZooStep`, the batch for one H200, and
the arguments of its tiny form, as `benchmarks.judge_h200.unseen` has them. Every other one is what
most people train, at sizes of its own.
"""

from __future__ import annotations

from benchmarks.judge_h200.unmeasured import choices, fields, motions, pictures, texts
from benchmarks.judge_h200.unseen import Unseen

_TEXT = {"width": 48, "heads": 4, "length": 16, "vocabulary": 64}
_GROUPED = {**_TEXT, "shared": 2, "inner": 64}

UNMEASURED: dict[str, Unseen] = {
    "learned places": (texts.learned_places, 8, {**_TEXT, "depth": 1}),
    "codes of pictures": (pictures.codes_of_pictures, 32, {"channels": 16, "size": 16}),
    "llama, recomputed in bfloat16": (texts.grouped_recomputed, 2, _GROUPED),
    "columns": (choices.columns, 2048, {"features": 6, "width": 24, "heads": 2, "depth": 1}),
    "micro-batches in a scan": (texts.accumulated, 2, {**_GROUPED, "parts": 2}),
    "series": (choices.series, 2048, {"length": 64, "width": 32, "heads": 2, "depth": 1}),
    "stacked layers": (texts.stacked_layers, 8, {**_GROUPED, "depth": 2}),
    "many labels": (
        choices.many_labels,
        1024,
        {"length": 8, "width": 16, "words": 50, "labels": 33},
    ),
    "noisy encoder": (texts.noisy_encoder, 32, {**_TEXT, "depth": 1}),
    "translator": (motions.translator, 128, {"width": 16, "length": 4, "vocabulary": 40}),
    "bytes": (texts.byte_level, 8, {"width": 32, "heads": 2, "length": 16, "depth": 1}),
    "linear recurrences": (
        motions.linear_recurrences,
        16,
        {"width": 16, "states": 8, "length": 32, "depth": 1},
    ),
    "dense experts": (texts.dense_experts, 8, {**_TEXT, "experts": 4, "inner": 32}),
    "conformer": (motions.conformer, 32, {"width": 32, "heads": 2, "frames": 32, "depth": 1}),
    "registers": (pictures.registers, 128, {"width": 32, "heads": 2, "size": 28, "depth": 1}),
    "plans of robots": (motions.plans_of_robots, 512, {"channels": 16}),
    "masked patches": (
        pictures.masked_patches,
        128,
        {"width": 32, "heads": 2, "narrow": 16, "size": 64, "depth": 1},
    ),
    "corrected actors": (
        motions.corrected_actors,
        64,
        {"time": 5, "width": 16, "actions": 3, "features": 12},
    ),
    "joint diffusion": (
        pictures.joint_diffusion,
        8,
        {"width": 32, "heads": 2, "size": 8, "words": 6, "depth": 1},
    ),
    "meshes": (fields.meshes, 40000, {"width": 16, "depth": 1}),
    "text to picture": (pictures.text_to_picture, 8, {"width": 64, "size": 8, "words": 5}),
    "hashed scene": (fields.hashed_scene, 8192, {"levels": 2, "held": 512, "samples": 4}),
    "small images": (pictures.small_images, 512, {"width": 8, "size": 16}),
    "branch and trunk": (
        fields.branch_and_trunk,
        8192,
        {"sensors": 12, "points": 10, "width": 16, "depth": 2},
    ),
    "sigmoid pairs": (
        pictures.sigmoid_pairs,
        64,
        {"width": 48, "heads": 2, "length": 8, "depth": 1},
    ),
    "transport": (fields.transport, 2048, {"given": 8, "width": 16, "trips": 3}),
    "factors": (choices.factors, 32768, {"fields": 5, "ids": 100, "width": 4, "deep": 16}),
    "organs": (fields.organs, 4, {"channels": 8, "size": 8}),
    "interests": (choices.interests, 8192, {"items": 50, "length": 6, "width": 8}),
}
