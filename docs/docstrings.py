"""autopar's docstrings → Markdown, for the reference of the site.

They list arguments as `name: what it is`, with indented continuation lines; that becomes a list.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_ENTRY = re.compile(r"^((?:\w+|\*\*?\w+)(?:, (?:\w+))*):\s+(\S.*)$")


class Lists(Extension):
    """Called by griffe for every object that it has read."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        names = set(getattr(obj, "members", {}))
        names |= {parameter.name.lstrip("*") for parameter in getattr(obj, "parameters", ())}
        obj.docstring.value = as_lists(obj.docstring.value, names)


def as_lists(text: str, names: set[str]) -> str:
    """The text with its `name: …` entries as a Markdown list."""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        entry = _ENTRY.match(line)
        if entry and {name.lstrip("*") for name in entry[1].split(", ")} <= names:
            if not inside and out and out[-1].strip():
                out.append("")
            shown = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            out.append(f"- {shown}: {entry[2]}")
            inside = True
        elif inside and line.strip():
            if line.startswith(" ") or not _starts_anew(out):
                out.append("  " + line.strip())
            else:
                inside = False
                out.append(line)
        else:
            out.append(line)
    return "\n".join(out)


def _starts_anew(out: list[str]) -> bool:
    """Whether a blank line came before: then text at the margin is no part of the entry."""
    return not out[-1].strip()
