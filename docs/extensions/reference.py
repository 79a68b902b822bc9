"""Writes the reference out of the program itself, where a page has `<!-- reference: KIND WHAT -->`.

KIND is one of:

- `commands noisescale` or `commands noisescale-server`: every command with its options and examples;
- `endpoints all` and `schemas all`: the HTTP API, out of the OpenAPI document;
- `metrics runs` and `metrics process`: every metric family, as the server exposes it;
- `api MODULE`: every public name of a module, out of the docstrings.

So the pages cannot fall behind the program. tests/docs holds the built pages against it all the same.
"""

import re
from collections.abc import Callable, Iterator

from reference_commands import commands
from reference_http import endpoints, schemas
from reference_metrics import metrics
from reference_python import api
from sphinx.application import Sphinx

MARKER = re.compile(r"^<!-- reference: (\w+) ([\w.-]+) -->$", re.MULTILINE)
KINDS: dict[str, Callable[[str], Iterator[str]]] = {
    "commands": commands,
    "endpoints": endpoints,
    "schemas": schemas,
    "metrics": metrics,
    "api": api,
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", _on_source_read)
    return {"parallel_read_safe": True}


def fill_in(text: str) -> str:
    """A page's text with the reference in place of the markers."""
    return MARKER.sub(lambda found: "\n".join(KINDS[found[1]](found[2])), text)


def _on_source_read(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = fill_in(source[0])
