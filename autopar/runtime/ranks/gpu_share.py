"""Which part of a GPU the devices of this process are: from the environment to a `GpuShare`."""

from __future__ import annotations

import os

from autopar.ir.profile import GpuShare
from autopar.runtime.ranks.machines import ranks_per_gpu


def gpu_share(platform: str) -> GpuShare | None:
    """None if each device is a whole one."""
    count = ranks_per_gpu() if platform == "gpu" else 1
    return None if count == 1 else GpuShare(count, mps="CUDA_MPS_PIPE_DIRECTORY" in os.environ)
