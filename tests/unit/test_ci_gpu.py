"""`.ci/gpu` runs every file of tests/gpu: it checks so itself, but only where it is run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_is_in_a_part():
    text = (ROOT / ".ci" / "gpu").read_text()
    parts = dict(re.findall(r'\[(\w+)\]="([^"]+)"', text))
    (order,) = re.findall(r"^order=\((.*)\)$", text, re.MULTILINE)
    assert order.split() == list(parts)
    listed = [name for files in parts.values() for name in files.split()]
    assert sorted(listed) == sorted(
        path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    )
