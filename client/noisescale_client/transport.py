"""One HTTP exchange with a noisescale server: URL, token, timeouts, size limits.

The only module that touches urllib3, and the one place where the token's environment variable
is read.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

import urllib3
from urllib3.exceptions import (
    HTTPError,
    LocationParseError,
    MaxRetryError,
    NewConnectionError,
    ProtocolError,
    TimeoutError,  # noqa: A004  urllib3's own, which is not the builtin
)
from urllib3.util import Retry, Timeout, parse_url

from noisescale.errors import InvalidInputError
from noisescale_client.errors import ServerUnreachableError

TOKEN_VARIABLE = "NOISESCALE_TOKEN"  # noqa: S105  a variable's name, not a token
URL_VARIABLE = "NOISESCALE_URL"
DEFAULT_URL = "http://127.0.0.1:8000"

MAX_ANSWER_BYTES = 64 * 2**20
"""More than any answer of a noisescale server; a larger one is cut off and will not parse."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def check_url(url: str) -> str:
    """The server's URL without a trailing slash.

    Raises:
        InvalidInputError: It is not http:// or https:// with a host, or it carries a password.
    """
    try:
        parsed = parse_url(url)
    except LocationParseError:
        parsed = None
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidInputError(
            f"the server's URL must look like http://HOST:PORT or https://HOST, got {url!r}", field="url"
        )
    if parsed.auth or parsed.query or parsed.fragment:
        raise InvalidInputError(
            "the server's URL must hold no user, password, query or fragment; "
            f"give a token with token= or {TOKEN_VARIABLE}",
            field="url",
        )
    return url.rstrip("/")


@dataclass(slots=True)
class Transport:
    """Speaks HTTP with one server; connections are kept open between requests.

    Safe to use from one thread at a time.

    Args:
        url: The server's, as check_url left it.
        token: Sent as a bearer token; None reads NOISESCALE_TOKEN, and sends none without it.
        connect_timeout_s: Longest wait for a connection.
        read_timeout_s: Longest wait for the next piece of the answer.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0
    _pool: urllib3.PoolManager | None = field(default=None, init=False, repr=False)

    def exchange(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        retry_lost_connection: bool = False,
    ) -> Answer:
        """Send one request and read the whole answer, whatever its status.

        Args:
            path: Below the server's URL, with its query; starts with "/".
            retry_lost_connection: Try once more where a kept-open connection turns out closed.

        Raises:
            ServerUnreachableError: No answer, or half of one.
            InvalidInputError: The token cannot be sent in a header.
        """
        if self._pool is None:
            self._pool = urllib3.PoolManager(num_pools=1, maxsize=1)
        sent = {"User-Agent": f"noisescale/{version('noisescale')}", "Accept": "application/json"}
        if token := self._token():
            sent["Authorization"] = f"Bearer {token}"
        tries = 1 if retry_lost_connection else 0
        try:
            response = self._pool.request(
                method,
                self.url + path,
                body=body,
                headers={**sent, **(headers or {})},
                timeout=Timeout(connect=self.connect_timeout_s, read=self.read_timeout_s),
                retries=Retry(
                    total=tries,
                    connect=0,
                    read=tries,
                    other=0,
                    redirect=False,
                    allowed_methods=None,
                ),
                redirect=False,
                preload_content=False,
            )
            try:
                content = response.read(MAX_ANSWER_BYTES, decode_content=True)
            finally:
                response.close()  # a connection whose answer was read to its end is kept for the next request
            return Answer(status=response.status, headers=response.headers, body=content)
        except HTTPError as error:
            raise ServerUnreachableError(url=self.url, cause=self._in_words(error)) from error

    def close(self) -> None:
        """Close the connections that are kept open."""
        if self._pool is not None:
            self._pool.clear()
            self._pool = None

    def _token(self) -> str | None:
        token = self.token if self.token is not None else os.environ.get(TOKEN_VARIABLE)
        if token and not (token.isascii() and token.isprintable() and " " not in token):
            raise InvalidInputError(
                "the token holds a space, a line break or a character that is not ASCII; "
                f"look at what token= or {TOKEN_VARIABLE} was given",
                field="token",
            )
        return token

    def _in_words(self, error: HTTPError) -> str:
        reason: BaseException = error.reason if isinstance(error, MaxRetryError) and error.reason else error
        if isinstance(reason, TimeoutError) and not isinstance(reason, NewConnectionError):
            return (
                f"it took longer than {self.connect_timeout_s:g} s to connect "
                f"or {self.read_timeout_s:g} s to answer"
            )
        if isinstance(reason, ProtocolError):
            return "the connection was closed before the answer was complete"
        # urllib3 puts the repr of a connection, with its address in memory, before the reason.
        words = re.sub(r"\[Errno -?\d+\] ", "", str(reason).rpartition(": ")[2])
        return words or type(reason).__name__
