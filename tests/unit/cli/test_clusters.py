import pytest

from autopar.cli.clusters import Overrides, parse_target, with_devices
from autopar.errors import ArgumentError, ProfileError
from autopar.ir.devices import DEVICES
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from tests.machine_profiles import machine_profile

FULL = """
[cluster]
hosts = 50
devices_per_host = 4
[device]
name = "chip"
memory = "32 GB"
flops_16bit = "125 TFLOP/s"
flops_32bit = "15.7 TFLOP/s"
memory_bandwidth = "900 GB/s"
efficiency = 0.5
[links]
intra_host_bandwidth = "130 GB/s"
inter_host_bandwidth = "25 Gb/s"
intra_host_latency = "4 us"
inter_host_latency = "20 us"
"""
RELATIVE = """
[cluster]
hosts = 50
devices_per_host = 4
[device]
memory = "32 GB"
[links]
alpha = [1, 1]
beta = [1, 0.01]
"""


def toml(tmp_path, text: str) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return str(path)


def test_a_shape_and_a_device() -> None:
    assert parse_target("50x4:v100-32gb").cluster == ClusterSpec(50, 4, "v100-32gb")
    assert parse_target("2×8").cluster == ClusterSpec(2, 8, "h100-sxm")


def test_flags_replace_figures() -> None:
    flags = Overrides("28 GB", "100 GB/s", "25 Gb/s")
    spec = parse_target("2x8:a100-sxm", flags).cluster.spec
    assert spec.memory_bytes == 28e9
    assert spec.intra_host_bandwidth == 100e9
    assert spec.host_bandwidth == 25e9 / 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("eight", "needs HOSTSxDEVICES:DEVICE, such as 50x4:v100-32gb, or the path"),
        ("8:h100", "needs HOSTSxDEVICES:DEVICE"),
        ("1x8:h100-smx", r"unknown device 'h100-smx' \(did you mean 'h100-sxm'"),
        ("1x8:v100-32", "did you mean 'v100-32gb'"),
        ("0x8:v100", "needs at least one host with one device"),
        ("100000x8", "800000 devices; plans are made for at most"),
        ("missing.toml", "cannot read the file: No such file"),
    ],
)
def test_wrong_clusters(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        parse_target(text)


def test_a_file_describes_everything(tmp_path) -> None:
    target = parse_target(toml(tmp_path, FULL))
    spec = target.cluster.spec
    assert (target.cluster.num_hosts, target.cluster.devices_per_host) == (50, 4)
    assert target.mesh is None
    assert (spec.name, spec.flops_16bit, spec.flops_32bit) == ("chip", 125e12, 15.7e12)
    assert (spec.memory_bytes, spec.memory_bandwidth, spec.efficiency) == (32e9, 900e9, 0.5)
    assert (spec.intra_host_bandwidth, spec.host_bandwidth) == (130e9, 25e9 / 8)
    assert (spec.intra_host_alpha_s, spec.inter_host_alpha_s) == pytest.approx((4e-6, 20e-6))


def test_a_preset_gives_what_the_file_does_not(tmp_path) -> None:
    text = "[cluster]\nhosts = 1\ndevices_per_host = 8\n[device]\npreset = 'v100'\nmemory = '32 GB'"
    spec = parse_target(toml(tmp_path, text)).cluster.spec
    assert spec.memory_bytes == 32e9
    assert spec.flops_16bit == DEVICES["v100"].flops_16bit


def test_links_in_relative_units(tmp_path) -> None:
    target = parse_target(toml(tmp_path, RELATIVE), Overrides(memory="24 GB"))
    assert target.mesh == LogicalMesh((50, 4), alpha=(1, 1), beta=(1, 0.01), memory_bytes=24e9)
    with pytest.raises(ArgumentError, match="links are in relative units"):
        parse_target(toml(tmp_path, RELATIVE), Overrides(inter_bandwidth="25 Gb/s"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[cluster]", "[cluster", "not TOML: "),
        ("hosts = 50", "hosts = 0", r"\[cluster\] hosts = 0; needs a whole number ≥ 1"),
        ("hosts = 50", "", r"\[cluster\] hosts is missing"),
        ("hosts = 50", "host = 50", r"\[cluster\]: unknown name 'host' \(did you mean 'hosts'"),
        ("[device]", "[devices]", r"unknown name 'devices' \(did you mean 'device'\?\)"),
        ('"32 GB"', "32", r"\[device\] memory = 32: a number without a unit"),
        ('"32 GB"', '"32 GB/s"', r"\[device\] memory = '32 GB/s': 'GB/s' is not a unit of memory"),
        ('"25 Gb/s"', '"25 GB"', r"\[links\] inter_host_bandwidth = '25 GB'"),
        ('"25 Gb/s"', '"25 gb/s"', "did you mean 'GB/s' or 'Gb/s'"),
        ('"4 us"', '"4 GB"', r"\[links\] intra_host_latency = '4 GB': 'GB' is not a unit of time"),
        ("efficiency = 0.5", "efficiency = 50", r"\[device\] efficiency = 50: needs the share"),
        ('memory = "32 GB"', "", r"\[device\] memory missing. Give them, or a preset"),
        ('intra_host_bandwidth = "130 GB/s"', "", r"\[links\] intra_host_bandwidth missing"),
        ('name = "chip"', "name = 3", r"\[device\] name = 3: needs text"),
        ('name = "chip"', 'preset = "v10"', r"preset = 'v10': unknown device \(did"),
        ("[links]", "[links]\nbeta = [1]", r"\[links\] alpha is missing; needs two numbers"),
        ("[links]", "[links]\nalpha=[1,1]\nbeta=[1,1]", "mixes relative units"),
    ],
)
def test_wrong_files_name_the_field(tmp_path, old: str, new: str, said: str) -> None:
    assert old in FULL
    with pytest.raises(ArgumentError, match=said) as caught:
        parse_target(toml(tmp_path, FULL.replace(old, new, 1)))
    assert "cluster.toml" in str(caught.value)


def test_more_or_fewer_of_the_same_devices() -> None:
    target = parse_target("1x8:v100")
    assert with_devices(target, 4).cluster == ClusterSpec(1, 4, "v100")
    assert with_devices(target, 32).cluster == ClusterSpec(4, 8, "v100")
    with pytest.raises(ArgumentError, match="hosts have 8 devices; more than one host needs"):
        with_devices(target, 12)


# -- profiles


def test_profiles_by_flag_and_by_file(tmp_path) -> None:
    profile = machine_profile()
    profile.save(tmp_path / "mine.json")
    by_flag = parse_target("1x8", Overrides(profile=str(tmp_path / "mine.json"))).cluster
    assert by_flag.measured == profile and by_flag.device == "h200-sxm"
    toml = tmp_path / "cluster.toml"
    toml.write_text('[cluster]\nhosts = 1\ndevices_per_host = 8\nprofile = "mine.json"\n')
    by_file = parse_target(str(toml)).cluster
    assert by_file.measured == profile and by_file.spec.name == "h200-sxm"
    toml.write_text(
        '[cluster]\nhosts = 1\ndevices_per_host = 8\nprofile = "mine.json"\n'
        '[device]\npreset = "a100-sxm"\n'
    )
    with pytest.raises(ProfileError, match="'a100-sxm'"):
        parse_target(str(toml))
    toml.write_text("[cluster]\nhosts = 1\ndevices_per_host = 8\nprofile = 3\n")
    with pytest.raises(ArgumentError, match=r"\[cluster\] profile = 3"):
        parse_target(str(toml))
    toml.write_text(
        '[cluster]\nhosts = 1\ndevices_per_host = 8\nprofile = "mine.json"\n'
        '[device]\nmemory = "1 GB"\n[links]\nalpha = [1, 1]\nbeta = [1, 1]\n'
    )
    with pytest.raises(ArgumentError, match="relative units"):
        parse_target(str(toml))
