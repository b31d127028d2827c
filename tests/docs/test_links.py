"""Links between pages, to files, pictures and anchors lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, pages

_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_REFERENCE = re.compile(r"^::: +(\S+)", re.MULTILINE)
ALL_PAGES = [*pages(), ROOT / "CHANGELOG.md"]


def _anchors(page: Path) -> set[str]:
    """The anchors that mkdocs and GitHub give to the headings of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set(_REFERENCE.findall(text))
    for heading in _HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        words = re.sub(r"[^\w\s-]", "", words).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md" and anchor not in _anchors(file):
            broken.append(f"{target} (no such heading)")
    assert not broken, f"{page.relative_to(ROOT)}: {broken}"


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading, `x`\n\n[there](#a-heading-x) [gone](gone.md)\n")
    assert _anchors(page) == {"a-heading-x"}
    assert _LINK.findall(_CODE.sub("", page.read_text())) == ["#a-heading-x", "gone.md"]
