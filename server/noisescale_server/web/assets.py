"""The scripts and styles that the pages load: ours from this package, Plotly's from its own."""

import functools
import gzip
import hashlib
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

PLOTLY = "plotly.min.js"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it is and compressed."""

    content: bytes
    gzipped: bytes
    media_type: str


@functools.cache
def assets() -> dict[str, Asset]:
    """All files by name, read once; Plotly's is 5 MB, so nothing is read before a browser asks."""
    found = {
        file.name: file.read_bytes()
        for file in files("noisescale_server.web").joinpath("static").iterdir()
        if Path(file.name).suffix in _TYPES
    }
    # Located and not imported: the Python side of Plotly is big, and nothing of it is needed.
    found[PLOTLY] = Path(
        str(distribution("plotly").locate_file(f"plotly/package_data/{PLOTLY}"))
    ).read_bytes()
    return {
        name: Asset(content, gzip.compress(content, 6, mtime=0), _TYPES[Path(name).suffix])
        for name, content in found.items()
    }


@functools.cache
def assets_version() -> str:
    """Changes whenever any file does; part of every file's address, so that browsers may keep them."""
    digest = hashlib.sha256()
    for name, asset in sorted(assets().items()):
        digest.update(name.encode() + b"\0" + asset.content)
    return digest.hexdigest()[:16]
