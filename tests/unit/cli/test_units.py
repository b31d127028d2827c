import pytest

from autopar.cli.units import parse_quantity
from autopar.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("32 GB", "memory", 32e9),
        ("32GB", "memory", 32e9),
        ("80 GiB", "memory", 80 * 2**30),
        ("512 MB", "memory", 512e6),
        ("1e9 B", "memory", 1e9),
        ("25 Gb/s", "bandwidth", 25e9 / 8),
        ("25 GB/s", "bandwidth", 25e9),
        ("400 Gbit/s", "bandwidth", 50e9),
        ("100Gbps", "bandwidth", 12.5e9),
        ("1.5 TB/s", "bandwidth", 1.5e12),
        ("312 TFLOP/s", "speed", 312e12),
        ("2.25PFLOPS", "speed", 2.25e15),
        ("5 us", "time", 5e-6),
        ("5µs", "time", 5e-6),
        ("0.2 ms", "time", 2e-4),
    ],
)
def test_figures(text: str, kind: str, expected: float) -> None:
    assert parse_quantity(text, kind, "f") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (32, "memory", r"file: memory = 32: a number without a unit. Give bytes, such as '32 GB'"),
        ("32", "memory", "a number without a unit"),
        ("32 Gb/s", "memory", "'Gb/s' is not a unit of memory but of bandwidth"),
        ("25 GB", "bandwidth", "'GB' is not a unit of bandwidth but of memory"),
        ("25 gb/s", "bandwidth", r"did you mean 'GB/s' or 'Gb/s'\?; b is a bit and B a byte"),
        ("25 GBPS", "bandwidth", r"did you mean 'Gbps'\?; b is a bit and B a byte\)"),
        ("5 MS", "time", r"'MS' is not a unit of time \(did you mean 'ms'\?\)"),
        ("5 tflops", "speed", r"'tflops' is not a unit of speed \(did you mean 'TFLOPS'\?\)"),
        ("32 gigs", "memory", "'gigs' is not a unit of memory. Give bytes"),
        ("fast", "speed", "not a number with a unit"),
        ("-3 GB", "memory", "not a number with a unit"),
        ("0 GB", "memory", "must be positive"),
        (True, "time", "not a number with a unit"),
        (["5 us"], "time", "not a number with a unit"),
    ],
)
def test_wrong_figures_say_what_is_accepted(given, kind: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        parse_quantity(given, kind, "file: memory")
