"""What a visitor is promised: the landing page, the gallery, guides, search."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gallery

ROOT = Path(__file__).parents[2]
README, INDEX = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md")
)
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def bash_blocks(text: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)


def test_the_landing_page_has_the_readmes_install_a_picture_and_a_result():
    (install,) = bash_blocks(INDEX)
    assert install in bash_blocks(README) and "autopar demo" in install
    (picture, *_) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", INDEX)
    assert (ROOT / "docs" / picture).stat().st_size > 10_000
    assert f"docs/{picture}" in README
    assert "of the time of the best hand-tuned expert layout" in INDEX
    assert "(gallery.md)" in INDEX and "(limits.md)" in INDEX


def test_the_readme_has_its_parts_in_order():
    heads = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert heads == [
        "Limits first", "Install", "Use it", "Methods", "See the plan", "Results", "More",
    ]  # fmt: skip
    methods = README.split("## Methods")[1].split("## ")[0]
    assert len([line for line in methods.splitlines() if line.startswith("| ")]) == 1 + 5
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for name in ("state", "batch", "train_step"):
        assert re.search(rf"^(def )?{name}\b", snippet, re.MULTILINE), f"{name} is not defined"


@pytest.mark.parametrize("kind", ["gpt", "llama", "moe", "vit", "unet", "dlrm"])
def test_the_gallery_has_each_kind_of_model_on_8_and_64_devices(kind: str):
    sizes = {entry.devices for name, entry in gallery.entries().items() if name.startswith(kind)}
    assert sizes == {8, 64}


@pytest.mark.parametrize("name", ["alpa", "pjit", "pmap", "fsdp", "deepspeed", "megatron"])
def test_guides_from_elsewhere_are_on_the_site_and_run(name: str):
    page = f"howto/from_{name}.md"
    assert page in SITE and f"({page})" in INDEX
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = text.count("```python")
    assert blocks > text.count("<!-- not run"), "its code is run by test_code_blocks"


def test_the_site_can_be_searched():
    plugins = SITE.split("\nplugins:")[1]
    assert plugins.splitlines()[1].strip() == "- search"
