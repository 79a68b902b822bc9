"""The scripts and styles that pages load: ours from this package, Plotly's and Swagger UI's from theirs."""

import functools
import gzip
import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

PLOTLY = "plotly.min.js"
SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it is and compressed."""

    content: bytes
    gzipped: bytes
    media_type: str


@functools.cache
def assets() -> dict[str, Asset]:
    """All files by name, read once; two are big, so nothing is read before a browser asks."""
    found = {
        file.name: file.read_bytes()
        for file in files("noisescale_server.web").joinpath("static").iterdir()
        if Path(file.name).suffix in _TYPES
    }
    # Located and not imported: the Python side of Plotly is big, and nothing of it is needed.
    found[PLOTLY] = Path(
        str(distribution("plotly").locate_file(f"plotly/package_data/{PLOTLY}"))
    ).read_bytes()
    for name in SWAGGER:
        found[name] = Path(
            str(distribution("fastapi-offline").locate_file(f"fastapi_offline/static/{name}"))
        ).read_bytes()
    return {
        name: Asset(content, gzip.compress(content, 6, mtime=0), _TYPES[Path(name).suffix])
        for name, content in found.items()
    }


@functools.cache
def map_style_ids() -> list[str]:
    """Of the style elements that Plotly makes for its maps, which no page has, unless they are there."""
    return re.findall(r'getElementById\("([0-9a-f]{64})"\)', assets()[PLOTLY].content.decode())


@functools.cache
def assets_version() -> str:
    """Changes whenever any file does; part of every file's address, so that browsers may keep them."""
    digest = hashlib.sha256()
    for name, asset in sorted(assets().items()):
        digest.update(name.encode() + b"\0" + asset.content)
    return digest.hexdigest()[:16]
