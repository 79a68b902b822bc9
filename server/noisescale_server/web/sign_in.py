"""Signing in with a read token: browsers cannot send one as a header by themselves.

The token is kept in a cookie that no script can read and no other site can send; a GET that has
it and no Authorization header gets one. Only GET: what changes anything takes the header alone.
"""

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "noisescale_token"
KEPT_S = 30 * 86_400


class SignedIn:
    """Wraps an application: a signed-in browser's GETs carry its token."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            headers = dict(scope["headers"])
            token = _token(headers.get(b"cookie", b"")) if b"authorization" not in headers else None
            if token:
                added = (b"authorization", b"Bearer " + token.encode("latin-1", errors="ignore"))
                scope = {**scope, "headers": [*scope["headers"], added]}
        await self._app(scope, receive, send)


def local_path(wanted: str) -> str:
    """Where to go after signing in: a path here, and nowhere else."""
    parts = urlsplit(wanted)
    if parts.scheme or parts.netloc or not wanted.startswith("/") or wanted[1:2] in ("/", "\\"):
        return "/"
    return wanted


def from_another_site(headers: Mapping[str, str]) -> bool:
    """Whether another site made a browser send this; programs that are no browsers do not say.

    Such a form could sign somebody in with a token that is not theirs, or out.
    """
    site = headers.get("sec-fetch-site")  # only where the browser holds the connection for safe
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def _token(header: bytes) -> str | None:
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(header.decode("latin-1"))
    except CookieError:
        return None
    found = cookies.get(COOKIE)
    return found.value if found is not None else None
