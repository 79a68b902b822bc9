"""HTTP connections with an end to how long a request's first line and headers may be, and may take.

uvicorn has no such ends, so a client without any token could fill the memory and hold connections for good.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from noisescale.wire import ErrorBody, ErrorDetail
from noisescale_server.security_headers import secured

MOST_URL_BYTES = 8 * 2**10
MOST_HEAD_BYTES = 64 * 2**10
"""Of a request's line and all its headers."""

HEAD_S = 10.0
"""How long a request's line and headers may take, and a new connection to begin with them."""

_INVALID = (400, "invalid_http", "this is not a request that HTTP/1.1 knows")
_LONG_URL = (414, "url_too_long", f"the address may have at most {MOST_URL_BYTES} bytes")
_LONG_HEAD = (431, "headers_too_large", f"the headers may have at most {MOST_HEAD_BYTES} bytes in all")
_SLOW_HEAD = (408, "request_timeout", f"a request's line and headers may take at most {HEAD_S:g} seconds")


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol; what it does not let pass is an ErrorBody too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unused_bytes = 0
        self._refusal = _INVALID
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Wait for the first request."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and refuse it once too much of it has led to no request and no body."""
        self._unused_bytes += len(data)
        super().data_received(data)
        if self._unused_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = _LONG_HEAD
            self.send_400_response("")
        if self._is_in_head and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def on_message_begin(self) -> None:
        """Begin with a request's head."""
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head is too long.

        Raises:
            ValueError: It is; the parser makes a refusal of it.
        """
        refusal = None
        if len(self.url) > MOST_URL_BYTES:
            refusal = _LONG_URL
        elif self._unused_bytes > MOST_HEAD_BYTES:
            # It may be a body that was counted.
            head = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            refusal = _LONG_HEAD if head > MOST_HEAD_BYTES else None
        if refusal is not None:
            self._refusal = refusal
            raise ValueError(refusal[1])
        self._unused_bytes = 0
        self._is_in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Hand on a part of a body."""
        self._unused_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, and end the connection."""
        status, code, message = self._refusal
        body = ErrorBody(error=ErrorDetail(code=code, message=message)).model_dump_json().encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = [
            name + b": " + value + b"\r\n" for name, value in secured(headers, scheme=self.scheme or "http")
        ]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.close()

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refusal = _SLOW_HEAD
            self.send_400_response("")
