"""Headers that tell browsers how little this server's answers may do."""

from collections.abc import Iterable

Header = tuple[bytes, bytes]

_ALWAYS: tuple[Header, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"permissions-policy",
        b"camera=(), display-capture=(), geolocation=(), microphone=(), payment=()",
    ),
)
_OVER_TLS: tuple[Header, ...] = (*_ALWAYS, (b"strict-transport-security", b"max-age=31536000"))
_UNLESS_GIVEN: tuple[Header, ...] = (
    # For what is no page: nothing may be loaded. Pages say what they need by themselves.
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    # Numbers of runs are for whoever asked, not for a cache in between.
    (b"cache-control", b"no-store"),
)


def secured(headers: Iterable[Header], *, scheme: str) -> list[Header]:
    """An answer's headers with those that it lacks.

    There is no Access-Control-Allow-Origin among them: no other site's script may read an answer.

    Args:
        headers: Those that the answer has, names in lower case.
        scheme: By which the request came, as a proxy that is trusted says.
    """
    found = list(headers)
    given = {name for name, _ in found}
    found += [header for header in _UNLESS_GIVEN if header[0] not in given]
    found += _OVER_TLS if scheme == "https" else _ALWAYS
    return found
