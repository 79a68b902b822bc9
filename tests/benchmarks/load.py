"""A load generator: connections that are kept open, each sending its next request when the last is answered.

It runs in one process on an event loop, beside the server that it measures; it does as little per request as
Python lets it, since on two cores what it takes is missing there.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import uvloop

_ANSWER_S = 60.0

NextRequest = Callable[[int], bytes | None]
"""From a connection's number to the bytes of its next request; None: it has no more."""


@dataclass
class Load:
    """What came of some seconds of load.

    Attributes:
        latencies_s: Of every answer, in no order.
        statuses: How many answers had which; -1 counts connections that broke.
        wall_s: How long it took.
    """

    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    wall_s: float = 0.0

    @property
    def per_second(self) -> float:
        """Good answers per second."""
        return self.good / self.wall_s

    @property
    def good(self) -> int:
        """Answers that say it worked."""
        return sum(n for status, n in self.statuses.items() if 200 <= status < 300)

    @property
    def bad(self) -> int:
        """Answers that say it did not, and connections that broke."""
        return sum(self.statuses.values()) - self.good

    def quantile_ms(self, share: float) -> float:
        """That share of the answers took at most so long."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Connection(asyncio.Protocol):
    def __init__(self, number: int, next_request: NextRequest, load: Load, *, pause_s: float) -> None:
        self._number = number
        self._next_request = next_request
        self._load = load
        self._pause_s = pause_s
        self._received = b""
        self._wanted = 0
        self._sent_at = 0.0
        self._stopping = False
        self._transport: asyncio.WriteTransport | None = None
        self.idle = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is one only by its methods
        self.send()

    def send(self) -> None:
        if self._stopping:
            self.idle.set()
            return
        request = self._next_request(self._number)
        if request is None:
            self.idle.set()
            return
        assert self._transport is not None
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        if not self._wanted:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return
            self._wanted = end + 4 + _content_length(received[:end])
        if len(received) < self._wanted:
            return
        now = time.perf_counter()
        self._load.latencies_s.append(now - self._sent_at)
        self._load.statuses[int(received[9:12])] += 1
        self._received, self._wanted = b"", 0
        if self._pause_s:
            wait = self._pause_s - (now - self._sent_at)
            asyncio.get_running_loop().call_later(max(0.0, wait), self.send)
        else:
            self.send()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.idle.is_set():
            self._load.statuses[-1] += 1
            self.idle.set()

    def stop(self) -> None:
        """Send nothing more once the present request is answered."""
        self._stopping = True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def send_for(
    seconds: float,
    next_request: NextRequest,
    *,
    port: int,
    connections: int,
    warm_up_s: float = 0.0,
    per_second: float | None = None,
    begun: Callable[[], None] | None = None,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> Load:
    """Load a server on this machine, until the time is up or every connection has no more to send.

    Args:
        warm_up_s: Seconds before those that are counted.
        per_second: Requests over all connections; as many as are answered where None.
        begun: Called when counting begins.
        meanwhile: Runs beside it, and is cancelled at the end.
    """
    load = Load()
    loop = asyncio.get_running_loop()
    pause_s = connections / per_second if per_second else 0.0
    opened: list[_Connection] = []
    for number in range(connections):
        connection = _Connection(number, next_request, load, pause_s=pause_s)
        opened.append(connection)
        await loop.create_connection(lambda c=connection: c, "127.0.0.1", port)  # type: ignore[misc]  # binds c
        if pause_s:
            await asyncio.sleep(pause_s / connections)  # spread over the interval
    all_idle = asyncio.ensure_future(asyncio.wait([asyncio.ensure_future(c.idle.wait()) for c in opened]))
    beside = asyncio.ensure_future(meanwhile()) if meanwhile else None
    if warm_up_s:
        await asyncio.wait([all_idle], timeout=warm_up_s)
        load.latencies_s.clear()
        load.statuses.clear()
    if begun:
        begun()
    started = time.perf_counter()
    await asyncio.wait([all_idle], timeout=seconds)
    for connection in opened:
        connection.stop()
    done, _ = await asyncio.wait([all_idle], timeout=_ANSWER_S)
    load.wall_s = time.perf_counter() - started
    if not done:
        raise TimeoutError(f"the server left requests without an answer for {_ANSWER_S:g} seconds")
    for connection in opened:
        connection.close()
    if beside is not None:
        beside.cancel()
        for failed in await asyncio.gather(beside, return_exceptions=True):
            if isinstance(failed, Exception):
                raise failed
    return load


def run_load(coroutine: Awaitable[Load]) -> Load:
    """Run one load to its end, on the faster event loop."""

    async def whole() -> Load:
        return await coroutine

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(whole())


def request_bytes(
    method: str, path: str, body: bytes = b"", *, kind: str = "application/json", headers: str = ""
) -> bytes:
    """One request as it goes over the wire.

    Args:
        kind: The body's Content-Type.
        headers: Further ones, each with its line end.
    """
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}"
    if body:
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def _content_length(head: bytes) -> int:
    lowered = head.lower()
    at = lowered.find(b"content-length:")
    if at < 0:
        return 0  # 202 and 204 have none
    end = lowered.find(b"\r\n", at)
    return int(lowered[at + 15 : end if end >= 0 else len(lowered)])
