"""HTML from templates, with the headers that go with it."""

import functools
import hashlib
from importlib.metadata import version
from typing import Any

from fastapi import Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from noisescale_server.web.assets import assets_version, map_style_ids
from noisescale_server.web.sign_in import COOKIE
from noisescale_server.web.words import ACTIONS, FILTERS, GEOMETRIES, PHASES, REASONS, RULES

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'{styles}; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
POLICY = _POLICY.format(styles="")
DRAWING_POLICY = _POLICY.format(styles=f" {_EMPTY}; style-src-attr 'unsafe-inline'")
"""Plotly makes an empty style element, which it fills rule by rule, and sets style attributes on what it
draws. Scripts may be inline nowhere."""


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("noisescale_server.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals |= {
        "ACTIONS": ACTIONS,
        "REASONS": REASONS,
        "RULES": RULES,
        "GEOMETRIES": GEOMETRIES,
        "PHASES": PHASES,
        "version": version("noisescale"),
    }
    return environment


def page(
    request: Request, template: str, *, status: int = 200, draws: bool = False, **values: Any
) -> Response:
    """One page; 304 where the browser has it already.

    Args:
        template: Its file name.
        draws: Whether it has charts.
        values: What the template shows.
    """
    base = base_of(request)
    body = (
        _environment()
        .get_template(template)
        .render(
            base=base,
            static=f"{base}/static/{assets_version()}",
            origin=_origin(request),
            map_style_ids=map_style_ids() if draws else [],
            signed_in=COOKIE in request.cookies,
            **values,
        )
    )
    etag = f'"{hashlib.sha256(body.encode()).hexdigest()[:32]}"'
    headers = {
        "Content-Security-Policy": DRAWING_POLICY if draws else POLICY,
        "Cache-Control": "no-cache, private",
        "ETag": etag,
        "Vary": "Cookie, Authorization",
    }
    if status == 200 and request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(body, status_code=status, media_type="text/html", headers=headers)


def base_of(request: Request) -> str:
    """What comes before every path, behind a proxy that serves under a prefix."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _origin(request: Request) -> str:
    """Where jobs report to, as far as can be told from here."""
    return str(request.base_url).rstrip("/")
