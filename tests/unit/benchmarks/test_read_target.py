import re

import pytest

from autopar.measure.verify.targets import load_target, target_names
from benchmarks.read_target import description, differences


def attributes(config: str) -> tuple[dict[str, int], str, int]:
    """What a driver would say of the GPU that a description is of."""
    found = {key: float(value) for key, value in re.findall(r"(\w+): ([\d.]+)", config)}
    capability = re.search(r"capability \{([^}]*)\}", config)
    name = re.search(r'description_str: "([^"]*)"', config)
    assert capability and name
    version = dict(re.findall(r"(\w+): (\d+)", capability[1]))
    counts = {key: int(value) for key, value in found.items()}
    counts |= {"major": int(version["major"]), "minor": int(version.get("minor", 0))}
    counts |= {
        "clock_khz": round(found["clock_rate_ghz"] * 1e6),
        "memory_clock_khz": round(found["memory_bandwidth"] / 2 / 1000),
        "bus_bits": 8,
    }
    return counts, name[1], int(found["device_memory_size"])


@pytest.mark.parametrize("name", target_names())
def test_the_form_is_that_of_the_package(name: str):
    config = load_target(name).config
    assert description(*attributes(config)) == config


def test_differences_are_named():
    ours = load_target("h200-141gb").config
    found = ours.replace("core_count: 132", "core_count: 131").replace("H200", "H200 NVL")
    assert differences(ours, found) == [
        "core_count: 132 in the package, 131 here",
        "device_description_str: NVIDIA H200 in the package, NVIDIA H200 NVL here",
    ]
    assert not differences(ours, ours)
