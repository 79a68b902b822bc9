"""Lets autodoc read docstrings as they are written here: Markdown-like prose with |G|^2 and indented code."""

import re
from typing import Any

from pydantic import BaseModel
from sphinx.application import Sphinx

SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
BEFORE_NAPOLEON = 400


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to autodoc."""
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=BEFORE_NAPOLEON)
    app.connect("autodoc-process-signature", _without_fields)
    return {"parallel_read_safe": True}


def _as_restructured_text(
    _app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    out: list[str] = []
    in_section = in_code = False
    for line in lines:
        if line and not line.startswith(" "):
            in_section, in_code = line in SECTIONS, False
        elif line.startswith("    ") and not in_section and not in_code and (not out or not out[-1].strip()):
            out += [".. code-block:: text", ""]
            in_code = True
        out.append(line if in_code else _escaped(line))
    lines[:] = out


def _escaped(line: str) -> str:
    """Keep RST from seeing markup in mathematics; what is in backticks is code and stays."""
    out = ""
    for part in re.split(r"(`[^`]*`)", line):
        if part.startswith("`"):
            out += part
            continue
        part = re.sub(r"([|*])", r"\\\1", re.sub(r"(\w)_(?=\W|$)", r"\1\\_", part))
        # Code that goes on as a word, as in `batch_unit`s, ends there for RST too.
        out += "\\ " + part if out.endswith("`") and part[:1].isalnum() else part
    return out


def _without_fields(_app: Sphinx, what: str, _name: str, obj: Any, *_: Any) -> tuple[str, str] | None:
    """A model's fields are in its docstring, and again in a signature as long as a page."""
    if what == "class" and isinstance(obj, type) and issubclass(obj, BaseModel):
        return "", ""
    return None
