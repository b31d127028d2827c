"""What XLA's compilers of several JAX versions print, read: every text of a program has the
collectives and flops of its closed form."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import jax
import pytest

from autopar.runtime.hlo import read_collectives, read_dot_flops
from tests.unit.runtime.hlo_programs import PROGRAMS, Collective

FILES = sorted((Path(__file__).parent / "hlo_texts").glob("*.txt"))
VERSIONS = {"0.10.2", "0.11.2", "0.12.0.1"}


def read_texts(file: Path) -> dict[str, str]:
    """Program -> text."""
    sections = re.split(r"^// (.*)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


TEXTS = {file.stem: read_texts(file) for file in FILES}


def assert_closed_form(text: str, name: str, where: str) -> None:
    found: Counter[Collective] = Counter()
    for op in read_collectives(text):
        is_permutation = op.kind == "collective-permute"
        groups = op.groups if is_permutation else [tuple(sorted(group)) for group in op.groups]
        assert op.in_loop == (op.trips > 1)
        assert {len(group) for group in groups} == {op.group_size}
        found[Collective(op.kind, op.num_bytes, frozenset(groups), op.trips, op.dtype)] += 1
    assert found == Counter(PROGRAMS[name].collectives), where
    assert read_dot_flops(text) == PROGRAMS[name].dot_flops, where


def test_there_is_a_text_of_every_program_from_every_version() -> None:
    wanted = {
        f"{version}-{platform}": [n for n, one in PROGRAMS.items() if platform in one.platforms]
        for version in VERSIONS
        for platform in ("cpu", "gpu")
    }
    assert {stem: list(texts) for stem, texts in TEXTS.items()} == wanted


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_version_says_the_same(name: str) -> None:
    for stem, texts in TEXTS.items():
        if name in texts:
            assert_closed_form(texts[name], name, stem)


@pytest.mark.parametrize("name", [n for n, one in PROGRAMS.items() if "cpu" in one.platforms])
def test_so_does_the_version_that_is_installed(name: str) -> None:
    compiled = PROGRAMS[name].lower(jax.devices()[:8]).compile()
    assert_closed_form(compiled.as_text() or "", name, f"JAX {jax.__version__}")


@pytest.mark.parametrize(
    "form",
    [
        r"replica_groups=\{\{0,4\},\{1,5\},\{2,6\},\{3,7\}\}",
        r"replica_groups=\[2,4\]<=\[8\],",
        r"replica_groups=\[4,2\]<=\[2,4\]T\(1,0\),",
        r"replica_groups=mesh\['x'=2,'y'=4\] \{'y'\}",
        r"replica_groups=mesh\['x'=2,'y'=4\] \{'x','y'\}",
        r"replica_groups=mesh\['axis_0'=2,'axis_1'=2,'axis_2'=2\] \{'axis_2','axis_0'\}",
        r"replica_groups=mesh\['axis_0'=1,'axis_1'=4,'axis_2'=2\], device_ids=\(\[4,2\]T\(1,0\)\) ",
        r"replica_groups=mesh\['d'=8\] \{'d':\(2\)4\}",
        r" = f32\S+ all-reduce-start\(",
        r" = \(\(f32\S+\), f32\S+\) all-reduce-start\(",
        r" = \(f32\S+, f32\S+\) all-gather-start\(",
        r" = \(\(f32\S+\), f32\S+\) all-gather-start\(",
        r" = \(f32\S+, f32\S+\) collective-permute-start\(",
        r" = \(\(u8\S+\), u8\S+\) collective-permute-start\(",
        r" reduce-scatter-start\(",
        r" all-to-all-start\(",
        r" call-start\(",
        r" = \(f32\[8\]\S+, f32\[16\]\S+, f32\[2\]\S+\) all-reduce\(",
        r"/\*index=5\*/",
        r"\{0:S\(1\)\}",
        r"\{2,0,1\}",
        r"__cublas\$lt\$matmul",
        r"__cudnn\$convBackwardFilter",
    ],
)
def test_the_texts_have_every_form(form: str) -> None:
    assert any(re.search(form, text) for texts in TEXTS.values() for text in texts.values())
