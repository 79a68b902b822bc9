"""A small real HTTP server that takes reports, and misbehaves on demand."""

import gzip
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from noisescale.wire import BlocksReport


@dataclass
class Reply:
    """What the server does with one request.

    Attributes:
        hold: Answers only once this is set.
        cut: Bytes of the answer after which it closes the connection; None sends all.
    """

    status: int = 202
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hold: threading.Event | None = None
    cut: int | None = None


@dataclass
class Request:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def text(self) -> bytes:
        return gzip.decompress(self.body) if self.headers.get("Content-Encoding") == "gzip" else self.body

    @property
    def report(self) -> BlocksReport:
        return BlocksReport.model_validate_json(self.text)


@dataclass
class WireServer:
    """Requests so far, and the script of replies; without one, every report is accepted."""

    url: str
    requests: list[Request] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    always: Reply | None = None

    def next_reply(self, request: Request) -> Reply:
        if self.replies:
            return self.replies.pop(0)
        return self.always or accepted(request)

    @property
    def first_steps(self) -> list[list[int]]:
        """First steps of the blocks of every request."""
        return [[block.first_step for block in request.report.blocks] for request in self.requests]

    def wait_for_requests(self, count: int, *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.requests) < count:
            assert time.monotonic() < deadline, f"{len(self.requests)} of {count} requests came"
            time.sleep(0.005)


def accepted(request: Request) -> Reply:
    blocks = request.report.blocks
    last = blocks[-1].last_step if blocks else None
    body = {"accepted": len(blocks), "duplicates": 0, "last_step": last}
    return Reply(status=202, headers={"Content-Type": "application/json"}, body=json.dumps(body).encode())


def error(status: int, message: str, *, headers: dict[str, str] | None = None, **detail: Any) -> Reply:
    body = {"error": {"code": "test", "message": message} | detail}
    return Reply(status=status, headers=headers or {}, body=json.dumps(body).encode())


@contextmanager
def wire_server(*, port: int = 0) -> Iterator[WireServer]:
    """The server on a loopback port, until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(lambda: state))
    server.daemon_threads = True
    state = WireServer(url=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)


def _handler(state: Callable[[], WireServer]) -> type[socketserver.BaseRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            request = Request(self.command, self.path, dict(self.headers), body, time.monotonic())
            reply = state().next_reply(request)
            state().requests.append(request)
            if reply.hold is not None:
                reply.hold.wait(timeout=60)
            whole = self._head(reply) + reply.body
            try:
                self.wfile.write(whole[: reply.cut])
                self.wfile.flush()
            except OSError:
                self.close_connection = True  # the other side did not wait
            if reply.cut is not None:
                self.close_connection = True

        def _head(self, reply: Reply) -> bytes:
            headers = {"Content-Length": str(len(reply.body))} | reply.headers
            lines = [f"HTTP/1.1 {reply.status} Test", *(f"{key}: {value}" for key, value in headers.items())]
            return "\r\n".join([*lines, "", ""]).encode()

        do_GET = do_POST = _answer  # noqa: N815  the names that http.server looks for

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  http.server's own name
            """Nothing: the tests look at the requests."""

    return Handler
