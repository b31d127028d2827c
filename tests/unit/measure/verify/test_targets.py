import re
from pathlib import Path

import pytest

from autopar.errors import ArgumentError, CompileError
from autopar.ir.devices import DEVICES
from autopar.measure.verify import targets
from autopar.measure.verify.targets import cuda_version, load_target, target_names, target_of

EXPECTED = {
    # name: (compute capability, GB as sold, streaming multiprocessors)
    "t4-16gb": ((7, 5), 16, 40),
    "a10g-24gb": ((8, 6), 24, 80),
    "l4-24gb": ((8, 9), 24, 58),
    "l40s-48gb": ((8, 9), 48, 142),
    "v100-16gb": ((7, 0), 16, 80),
    "v100-32gb": ((7, 0), 32, 80),
    "a100-40gb": ((8, 0), 40, 108),
    "a100-80gb": ((8, 0), 80, 108),
    "h100-80gb": ((9, 0), 80, 132),
    "h200-141gb": ((9, 0), 141, 132),
    "b200-180gb": ((10, 0), 180, 148),
}


def test_the_promised_gpus_are_there():
    assert target_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_description_is_of_the_gpu_it_is_named_after(name: str):
    target = load_target(name)
    capability, sold_gb, multiprocessors = EXPECTED[name]
    assert target.compute_capability == capability
    # Vendors mean 2^30 bytes for some and 10^9 for others, and drivers keep a few percent.
    assert 0.95 * sold_gb * 1e9 < target.memory_bytes < 1.08 * sold_gb * 1e9
    assert f"core_count: {multiprocessors}\n" in target.config
    assert name.split("-")[0].upper() in target.description.upper()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_block_gets_no_more_than_its_multiprocessor_has(name: str):
    fields = {k: float(v) for k, v in re.findall(r"(\w+): ([\d.]+)", load_target(name).config)}
    assert fields["shared_memory_per_block"] <= fields["shared_memory_per_block_optin"]
    assert fields["shared_memory_per_block_optin"] <= fields["shared_memory_per_core"]
    assert fields["threads_per_block_limit"] <= fields["threads_per_core_limit"]


def test_every_gpu_that_plans_can_be_made_for_has_a_target():
    for device in DEVICES.values():
        if device.name == "cpu":
            continue
        target = target_of(device.name, device.memory_bytes)
        assert abs(target.memory_bytes / device.memory_bytes - 1) < 0.08, device.name


@pytest.mark.parametrize(
    ("device", "memory_bytes", "name"),
    [
        ("v100", 16e9, "v100-16gb"),
        ("v100-32gb", 32e9, "v100-32gb"),
        ("my A100", 40e9, "a100-40gb"),
        ("a100-sxm", 80e9, "a100-80gb"),
        ("GB200", 185e9, "b200-180gb"),
        ("l40s", 48e9, "l40s-48gb"),
        ("l4", 24e9, "l4-24gb"),
        ("a100", None, "a100-80gb"),
    ],
)
def test_the_nearest_memory_of_the_same_chip(device: str, memory_bytes: float | None, name: str):
    assert target_of(device, memory_bytes).name == name


def test_a_chip_with_another_memory_than_any_has():
    target = target_of("v100", 12e9)
    assert (target.name, target.memory_bytes) == ("v100-12gb", 12e9)
    assert target.description == "Tesla V100-SXM2-16GB, memory set to 12 GB"
    assert "device_memory_size: 12000000000\n" in target.config
    assert target_of("v100", 16e9).config == load_target("v100-16gb").config


def test_a_device_without_a_description():
    with pytest.raises(ArgumentError, match=r"'cpu'.*target='h100-80gb'.*a100-40gb"):
        target_of("cpu", 8e9)


def test_unknown_names_suggest_near_ones():
    with pytest.raises(ArgumentError, match=r"'h100-80': unknown GPU \(did you mean 'h100-80gb'"):
        load_target("h100-80")
    with pytest.raises(ArgumentError, match="or describe another GPU in a file"):
        load_target("zzz")
    with pytest.raises(ArgumentError, match="target=3"):
        load_target(3)  # type: ignore[arg-type]


def test_a_description_of_ones_own(tmp_path: Path):
    mine = tmp_path / "mine.txtpb"
    mine.write_text(load_target("h100-80gb").config.replace("84942979072", "50000000000"))
    target = load_target(mine)
    assert (target.name, target.memory_bytes) == ("mine", 5e10)
    assert load_target(str(mine)) == target
    mine.write_text("gpu_device_info { core_count: 1 }")
    with pytest.raises(ArgumentError, match=r"'mine'.*device_memory_size"):
        load_target(mine)
    with pytest.raises(ArgumentError, match="cannot read the file"):
        load_target(tmp_path / "missing.txtpb")


def _installed(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    monkeypatch.setattr(targets, "_is_there", lambda module: module in modules)


def test_without_a_cuda_plugin(monkeypatch: pytest.MonkeyPatch):
    _installed(monkeypatch)
    with pytest.raises(CompileError, match=r"pip install 'autopar\[verify\]'"):
        cuda_version(load_target("h100-80gb"))
    with pytest.raises(CompileError, match=r"pip install 'autopar\[verify-cuda12\]'"):
        cuda_version(load_target("v100-16gb"))


def test_cuda_13_no_longer_compiles_for_volta(monkeypatch: pytest.MonkeyPatch):
    _installed(monkeypatch, "jax_plugins.xla_cuda13")
    assert cuda_version(load_target("a100-40gb")) == 13
    with pytest.raises(CompileError, match=r"CUDA 13 .* v100-16gb .*7\.0.*verify-cuda12"):
        cuda_version(load_target("v100-16gb"))
    _installed(monkeypatch, "jax_plugins.xla_cuda12")
    assert cuda_version(load_target("v100-16gb")) == 12
