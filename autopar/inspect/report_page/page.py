"""The bytes of a page: style, scripts and data, put into `page.html`.

Names of users' modules and arrays may contain anything. In the page they are always data: JSON
without any `<`, which scripts show as text.
"""

from __future__ import annotations

import html
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

# In this order: each uses those before it.
SCRIPTS = (
    "base.js",
    "tables.js",
    "summary.js",
    "cluster.js",
    "tree_model.js",
    "tree_rows.js",
    "tree.js",
    "timeline_model.js",
    "timeline_paint.js",
    "timeline.js",
    "memory.js",
    "cut.js",
    "costs.js",
    "compare.js",
    "main.js",
)


def render(data: dict[str, Any]) -> bytes:
    parts = {
        "TITLE": html.escape(f"{data['head']['name']}: parallel plan"),
        "STYLE": page_style(),
        "DATA": embedded_json(data),
        "SCRIPT": "\n".join(map(_source, SCRIPTS)),
    }
    text = re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], _source("page.html"))
    return text.encode("utf-8", "xmlcharrefreplace")  # a name may be half of a surrogate pair


def page_style() -> str:
    """The style of the page: two themes, tables, cards."""
    return _source("page.css")


def embedded_json(data: Any) -> str:
    """Compact JSON for a script element, without characters that could end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _source(name: str) -> str:
    return files("autopar.inspect.report_page").joinpath(name).read_text(encoding="utf-8")
