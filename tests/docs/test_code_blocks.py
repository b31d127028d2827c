"""Every python and bash block of README, the documentation and the examples' pages runs."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import autopar
from tests.docs.blocks import ROOT, RUN, SHOWN, blocks_of, pages
from tests.docs.running import run_blocks

PAGES = [page for page in pages() if any(b.language in RUN for b in blocks_of(page))]
SLOW_PAGES = [page for page in PAGES if any("slow" in b.notes for b in blocks_of(page))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Gives each page its own database and session, and restores JAX's settings."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("AUTOPAR_PROGRESS", "0")
    settings = dict(jax.config.values)
    yield
    autopar.shutdown()
    for name, value in settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


@pytest.mark.representatives(
    "README.md",
    "CONTRIBUTING.md",
    "docs/index.md",
    "docs/concepts/plans.md",
    "docs/concepts/stages.md",
    "docs/howto/methods.md",
    "docs/report.md",
)
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_blocks(blocks_of(page), tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW_PAGES, ids=_name)
def test_all_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_blocks(blocks_of(page), tmp_path, slow=True)


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_blocks_say_what_they_are(page: Path) -> None:
    """Every block has a known language, so that no code hides, and a reason if it does not run."""
    for block in blocks_of(page):
        assert block.language in RUN | SHOWN, f"{block.where}: language {block.language!r}"
        for note in ("not run", "slow"):
            reason = block.notes.get(note)
            assert reason is None or len(reason.split()) >= 2, f"{block.where}: {note}: why?"


def test_most_python_blocks_are_run() -> None:
    blocks = [
        block
        for page in pages()
        if page.name != "mistakes.md"  # every block there has a test of its own
        for block in blocks_of(page)
        if block.language == "python"
    ]
    skipped = [b.where for b in blocks if "not run" in b.notes]
    assert len(blocks) > 40
    assert len(skipped) <= len(blocks) // 5, skipped
