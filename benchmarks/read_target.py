"""Prints a description of this machine's GPU, as in `autopar/measure/verify/gpu_targets`.

    python -m benchmarks.read_target > my_gpu.txtpb
    python -m benchmarks.read_target --compare h200-141gb

This needs a GPU and its driver. The figures come from the CUDA driver (`libcuda`, by ctypes), which
is where XLA gets them. `--compare` lists every figure that differs from a description in the
package.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys

from autopar.measure.verify.targets import load_target

# CUdevice_attribute, from the driver's header
_ATTRIBUTES = {
    "threads_per_block_limit": 1,
    "block_dim_limit_x": 5,
    "block_dim_limit_y": 6,
    "block_dim_limit_z": 7,
    "shared_memory_per_block": 8,
    "threads_per_warp": 10,
    "registers_per_block_limit": 12,
    "clock_khz": 13,
    "core_count": 16,
    "memory_clock_khz": 36,
    "bus_bits": 37,
    "l2_cache_size": 38,
    "threads_per_core_limit": 39,
    "major": 75,
    "minor": 76,
    "shared_memory_per_core": 81,
    "registers_per_core_limit": 82,
    "shared_memory_per_block_optin": 97,
}
# Float32 units of a multiprocessor, by compute capability.
_FPUS = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
_FPUS_OTHERS = 128


def read_gpu(number: int) -> tuple[dict[str, int], str, int]:
    """(attributes, name, bytes of memory) from the driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SystemExit(f"no CUDA driver found: {error}") from error

    def call(name: str, *arguments: object) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise SystemExit(f"{name} gave status {status}: is there a GPU number {number}?")

    call("cuInit", 0)
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), number)
    found = {}
    for name, attribute in _ATTRIBUTES.items():
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        found[name] = value.value
    text = ctypes.create_string_buffer(256)
    call("cuDeviceGetName", text, len(text), device)
    memory = ctypes.c_size_t()
    call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return found, text.value.decode(), memory.value


def description(found: dict[str, int], name: str, memory_bytes: int) -> str:
    capability = (found["major"], found["minor"])
    # Memory transfers twice per clock.
    bandwidth = 2 * found["memory_clock_khz"] * 1000 * found["bus_bits"] // 8
    fields = [
        *(
            (field, found[field])
            for field in (
                "threads_per_block_limit",
                "threads_per_warp",
                "shared_memory_per_block",
                "shared_memory_per_core",
                "threads_per_core_limit",
                "core_count",
            )
        ),
        ("fpus_per_core", _FPUS.get(capability, _FPUS_OTHERS)),
        *((f"block_dim_limit_{axis}", found[f"block_dim_limit_{axis}"]) for axis in "xyz"),
        ("memory_bandwidth", bandwidth),
        ("l2_cache_size", found["l2_cache_size"]),
        ("clock_rate_ghz", f"{found['clock_khz'] / 1e6:g}"),
        ("device_memory_size", memory_bytes),
        ("shared_memory_per_block_optin", found["shared_memory_per_block_optin"]),
    ]
    minor = f" minor: {capability[1]}" if capability[1] else ""
    lines = [
        "gpu_device_info {",
        *(f"  {field}: {value}" for field, value in fields),
        f"  cuda_compute_capability {{ major: {capability[0]}{minor} }}",
        f"  registers_per_core_limit: {found['registers_per_core_limit']}",
        f"  registers_per_block_limit: {found['registers_per_block_limit']}",
        "}",
        'platform_name: "CUDA"',
        "dnn_version_info { major: 9 minor: 10 }",
        f'device_description_str: "{name}"',
    ]
    return "\n".join(lines) + "\n"


def differences(ours: str, found: str) -> list[str]:
    """Figures that differ, as `field: ours, found`."""

    def fields(text: str) -> dict[str, str]:
        return {key: value.strip('"') for key, value in re.findall(r'(\w+): ("[^"]*"|\S+)', text)}

    left, right = fields(ours), fields(found)
    return [
        f"{key}: {left.get(key)} in the package, {right.get(key)} here"
        for key in sorted({*left, *right})
        if left.get(key) != right.get(key)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU")
    parser.add_argument("--compare", metavar="NAME", help="a target in the package")
    options = parser.parse_args()
    text = description(*read_gpu(options.gpu))
    if options.compare is None:
        sys.stdout.write(text)
        return
    found = differences(load_target(options.compare).config, text)
    print("\n".join(found) or f"the same as {options.compare}")


if __name__ == "__main__":
    main()
