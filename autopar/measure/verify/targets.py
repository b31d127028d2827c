"""GPUs that XLA can compile for without having one: from a device's name to a `GpuTarget`.

A description is a `GpuTargetConfigProto` in text form, one file per GPU in `gpu_targets/`, with
numbers from data sheets and CUDA's table of compute capabilities.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from autopar.errors import ArgumentError, CompileError, near_names

_SUFFIX = ".txtpb"
_MEMORY = re.compile(r"\bdevice_memory_size:\s*(\d+)")
_CAPABILITY = re.compile(r"cuda_compute_capability\s*\{([^}]*)\}")
_NAME = re.compile(r'\bdevice_description_str:\s*"([^"]*)"')
_SAME_MEMORY = 0.1  # vendors count in powers of two or ten, and drivers reserve some
_PLUGINS = {13: "jax_plugins.xla_cuda13", 12: "jax_plugins.xla_cuda12"}

# The oldest GPUs that the compilers of a CUDA version support.
_OLDEST_CAPABILITY = {12: (5, 0), 13: (7, 5)}


@dataclass(frozen=True)
class GpuTarget:
    """`name` is ours, `description` the vendor's; `config` is what XLA reads."""

    name: str
    description: str
    memory_bytes: float
    compute_capability: tuple[int, int]
    config: str


def target_names() -> list[str]:
    folder = resources.files("autopar.measure.verify") / "gpu_targets"
    names = [entry.name for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)]
    return sorted(name.removesuffix(_SUFFIX) for name in names)


def load_target(given: str | Path) -> GpuTarget:
    """A target by name, or from a file."""
    names = target_names()
    if isinstance(given, str) and given.lower() in names:
        name = given.lower()
        file = resources.files("autopar.measure.verify") / "gpu_targets" / f"{name}{_SUFFIX}"
        return _parsed(name, file.read_text(encoding="utf-8"))
    if not isinstance(given, (str, Path)):
        raise ArgumentError(f"target={given!r}: needs the name of a GPU or the path of a file.")
    path = Path(given)
    if path.suffix == _SUFFIX or path.is_file():
        try:
            return _parsed(path.stem, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"target={str(given)!r}: cannot read the file: {error}") from error
    near = near_names(str(given), names)
    raise ArgumentError(f"target={str(given)!r}: unknown GPU{near}. {_choice(names)}")


def _choice(names: list[str]) -> str:
    return (
        f"Choose from {', '.join(names)}, or describe another GPU in a file and give its path: "
        "target='my_gpu.txtpb'."
    )


def _parsed(name: str, config: str) -> GpuTarget:
    memory, capability = _MEMORY.search(config), _CAPABILITY.search(config)
    if memory is None or capability is None:
        raise ArgumentError(
            f"target={name!r}: the description needs device_memory_size and "
            "cuda_compute_capability. It is a GpuTargetConfigProto in text form, like the files in "
            "autopar/measure/verify/gpu_targets."
        )
    described = _NAME.search(config)
    numbers = dict(re.findall(r"\b(major|minor):\s*(\d+)", capability[1]))
    return GpuTarget(
        name,
        described[1] if described else name,
        float(memory[1]),
        (int(numbers.get("major", 0)), int(numbers.get("minor", 0))),
        config,
    )


def target_of(device: str, memory_bytes: float | None) -> GpuTarget:
    """The target of a plan's device: the same chip with the nearest memory or, if none is close,
    with the plan's memory. XLA uses more where there is more."""
    names = target_names()
    chips = {name.split("-")[0] for name in names}
    chip = max((chip for chip in chips if chip in device.lower()), key=len, default=None)
    if chip is None:
        raise ArgumentError(
            f"verify: no GPU description for the plan's device {device!r}. Choose the GPU to "
            f"compile for, as in target='h100-80gb'. {_choice(names)}"
        )
    targets = [load_target(name) for name in names if name.split("-")[0] == chip]
    if memory_bytes is None:
        return targets[-1]
    nearest = min(targets, key=lambda target: abs(target.memory_bytes - memory_bytes))
    if abs(nearest.memory_bytes / memory_bytes - 1) < _SAME_MEMORY:
        return nearest
    size = f"{memory_bytes / 1e9:.4g}"
    return replace(
        nearest,
        name=f"{chip}-{size}gb",
        description=f"{nearest.description}, memory set to {size} GB",
        memory_bytes=memory_bytes,
        config=_MEMORY.sub(f"device_memory_size: {memory_bytes:.0f}", nearest.config),
    )


def cuda_version(target: GpuTarget) -> int:
    """The CUDA version of JAX's plugin that can compile for the target."""
    installed = [version for version, module in _PLUGINS.items() if _is_there(module)]
    if not installed:
        raise CompileError(
            "verify: JAX's CUDA plugin, which contains XLA's GPU compiler, is not installed. "
            f"Install it with: pip install '{_extra(target)}'. No GPU is needed."
        )
    able = [v for v in installed if target.compute_capability >= _OLDEST_CAPABILITY[v]]
    if not able:
        capability = ".".join(map(str, target.compute_capability))
        raise CompileError(
            f"verify: CUDA {installed[0]} no longer supports {target.name} (compute capability "
            f"{capability}). Install JAX with CUDA 12 in a separate environment: "
            f"pip install '{_extra(target)}'."
        )
    return able[0]


def _extra(target: GpuTarget) -> str:
    is_old = target.compute_capability < _OLDEST_CAPABILITY[13]
    return "autopar[verify-cuda12]" if is_old else "autopar[verify]"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
