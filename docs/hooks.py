"""The pages of docs/ → the site: what mkdocs calls while it builds.

Pages are also read in the repository, so this file does three things. It removes the comments that
say how code blocks are tested. It turns links to files outside docs/ into links to their pages, or
into plain text where there is none. It inlines drawings, so that they take the page's colours. Four
pages are made from files: changes, contributing, examples, and the core from scratch, whose
comments become text. The build fails if the site would load anything from a network.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

# Files outside of docs/ that have a page of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/from_scratch.py": "from_scratch.md",
    "examples/README.md": "examples.md",
}

_NOTE = re.compile(
    r"^<!--\s*(?:setup|file|raises|slow|not run)\b.*?-->\n?", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)
_FENCES = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\bsrc=["']?(?:https?:)?//|"""
    r"""<link[^>]*\brel=["']?(?:stylesheet|preload|preconnect)[^>]*\bhref=["']?(?:https?:)?//|"""
    r"""@import\s+(?:url\()?["']?https?://|url\(["']?https?://"""
)


def on_files(files: Any, config: Any) -> Any:
    made = {
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "from_scratch.md": literate(ROOT / "docs" / "from_scratch.py"),
    }
    if files.get_file_from_path("examples.md") is None:
        made["examples.md"] = (ROOT / "examples" / "README.md").read_text()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    made = page.file.generated_by is not None
    source = next(a for a, b in PAGES.items() if b == uri) if made else f"docs/{uri}"
    parts = _FENCES.split(_NOTE.sub("", markdown))
    return "".join(
        part if index % 2 else _with_links(_with_drawings(part, source), source, page, files)
        for index, part in enumerate(parts)
    )


def on_post_build(config: Any) -> None:
    for file in sorted(Path(config["site_dir"]).rglob("*")):
        if file.suffix not in {".html", ".css"}:
            continue
        found = _LOADED.search(file.read_text(errors="replace"))
        if found:
            raise PluginError(f"{file}: loads {found[0]!r} from a network; put it into docs/")


def literate(path: Path) -> str:
    """A Python file whose comments at the left margin are text, as Markdown."""
    source = path.read_text()
    intro = ast.get_docstring(ast.parse(source)) or ""
    lines = source.splitlines()
    start = source[: source.index('"""', source.index('"""') + 3)].count("\n") + 1
    out, code = [intro, ""], []

    def close() -> None:
        while code and not code[0].strip():
            code.pop(0)
        while code and not code[-1].strip():
            code.pop()
        if code:
            out.extend(["```python", *code, "```", ""])
        code.clear()

    for before, line in zip(["", *lines[start:]], lines[start:], strict=False):
        if line.startswith("#") and (not before.strip() or (before.startswith("#") and not code)):
            close()
            out.append(line[1:].removeprefix(" "))
        else:
            if not code and out[-1].strip():
                out.append("")
            code.append(line)
    close()
    return "\n".join(out)


def _with_drawings(text: str, source: str) -> str:
    def drawing(match: re.Match[str]) -> str:
        path = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        svg = path.read_text().strip()
        if 'class="autopar-figure"' not in svg:  # plots have colours of their own
            return match[0]
        return f'<div class="figure" role="img" aria-label="{match[1]}">{svg}</div>'

    return _DRAWING.sub(drawing, text)


def _with_links(text: str, source: str, page: Any, files: Any) -> str:
    """Links of a page that stands at `source` in the repository."""

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not path:
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        uri = PAGES.get(there) or there.removeprefix("docs/")
        if there.startswith("docs/") or there in PAGES:
            if files.get_file_from_path(uri) is not None:
                here = posixpath.dirname(page.file.src_uri)
                near = posixpath.relpath(uri, here or ".")
                return f"[{words}]({near}{'#' + anchor if anchor else ''})"
            return match[0]
        if words.startswith("`"):
            return words
        return f"`{there}`" if words.strip("/") in there else f"{words} (`{there}`)"

    return _LINK.sub(link, text)
