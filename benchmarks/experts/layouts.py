"""All hand-written layouts in one module."""

from __future__ import annotations

from .handwritten import HandWritten, intercept_nnx
from .images import image_channels, image_data_parallel, image_fsdp, image_hsdp, image_zero2
from .mixtures import expert_parallel, experts_across_hosts, experts_in_hosts
from .recommenders import table_parallel
from .transformers import data_parallel, fsdp, hsdp, megatron, zero2

__all__ = [
    "HandWritten",
    "data_parallel",
    "expert_parallel",
    "experts_across_hosts",
    "experts_in_hosts",
    "fsdp",
    "hsdp",
    "image_channels",
    "image_data_parallel",
    "image_fsdp",
    "image_hsdp",
    "image_zero2",
    "intercept_nnx",
    "megatron",
    "table_parallel",
    "zero2",
]
