"""What one sender may ask for: requests a second, and how long a request's head may be."""

import contextlib
import socket
from pathlib import Path

import pytest

from noisescale_server.api_errors import ApiError
from noisescale_server.connections import MOST_HEAD_BYTES, MOST_URL_BYTES
from noisescale_server.limits import RequestRates
from tests.server.reports import report, some_blocks
from tests.services import Server, running_server


def accepted(rates: RequestRates, sender: str, requests: int) -> int:
    """How many of so many requests are let pass."""
    passed = 0
    for _ in range(requests):
        with contextlib.suppress(ApiError):
            rates.take(sender)
            passed += 1
    return passed


def test_a_bucket_empties_and_fills() -> None:
    """Twice the rate at once, then the rate, however long it was left alone; senders do not share."""
    now = [100.0]
    rates = RequestRates(per_s=10, clock=lambda: now[0])
    assert accepted(rates, "a", 50) == 20
    assert accepted(rates, "b", 50) == 20
    now[0] += 0.5
    assert accepted(rates, "a", 50) == 5
    now[0] += 3600
    assert accepted(rates, "a", 50) == 20


def test_a_slow_rate_says_when_there_is_room() -> None:
    """Retry-After counts the whole seconds until one request fits."""
    now = [0.0]
    rates = RequestRates(per_s=0.1, clock=lambda: now[0])
    rates.take("a")
    for waited, expected in [(0.0, "10"), (3.5, "7"), (9.99, "1")]:
        now[0] = waited
        with pytest.raises(ApiError) as refused:
            rates.take("a")
        assert (refused.value.headers or {})["Retry-After"] == expected
    now[0] = 10.0
    rates.take("a")


def test_many_senders_take_bounded_memory() -> None:
    """The one that asked longest ago is forgotten first."""
    rates = RequestRates(per_s=1, clock=lambda: 0.0)
    for number in range(10_001):
        rates.take(f"address-{number}")
    assert len(rates._buckets) == 10_000
    assert accepted(rates, "address-10000", 5) == 1
    assert accepted(rates, "address-0", 5) == 2


def test_no_limit() -> None:
    """0 lets everything pass, and remembers nobody."""
    rates = RequestRates(per_s=0)
    assert accepted(rates, "a", 10_000) == 10_000
    assert not rates._buckets


def test_requests_per_token(tmp_path: Path) -> None:
    """One token's requests, reports too, are bounded without a word to the other, health and pages' files."""
    settings = {"write_tokens": "a*:token-of-a-1234,b*:token-of-b-1234", "max_requests_per_s": 0.01}
    with running_server(tmp_path, **settings) as server:
        a, b = ({"Authorization": f"Bearer token-of-{name}-1234"} for name in "ab")
        assert server.post("/v1/runs/a1/blocks", report(some_blocks(10)), **a).status == 200
        for refused in (
            server.post("/v1/runs/a1/blocks", report(some_blocks(20)), **a),
            server.get("/v1/runs", **a),
            server.get("/runs/a1", **a),
        ):
            error = refused.json()["error"]
            assert (refused.status, error["code"]) == (429, "too_many_requests")
            assert "NOISESCALE_MAX_REQUESTS_PER_S" in error["message"]
            assert 1 <= int({k.lower(): v for k, v in refused.headers.items()}["retry-after"]) <= 100
        assert server.post("/v1/runs/b1/blocks", report(some_blocks(10)), **b).status == 200
        assert server.get("/v1/runs").status == 401  # the first of this address
        assert server.get("/v1/runs", Authorization="Bearer a-guess").status == 429
        assert server.post("/sign-in", b"token=a-guess").status == 429
        for _ in range(3):
            assert server.get("/healthz").status == 200
            assert server.get("/readyz").status == 200


def exchange(server: Server, *parts: bytes) -> bytes:
    """Send raw bytes as far as the server takes them; all that it answers until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65_536):
                answer += chunk
        return answer


HEAD = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
POST = b"POST /v1/runs/a/blocks HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("status", "code", "parts"),
    [
        (b"200", b"ok", [HEAD + b"X-Long: " + b"x" * 30_000 + b"\r\n\r\n"]),
        (b"431", b"headers_too_large", [HEAD + b"X-Long: " + b"x" * MOST_HEAD_BYTES + b"\r\n\r\n"]),
        (b"431", b"headers_too_large", [HEAD + b"X-Endless: ", *[b"x" * 10_000] * 20]),
        (b"431", b"headers_too_large", [HEAD, *[b"X-Many: x\r\n"] * 10_000]),
        (b"414", b"url_too_long", [b"GET /" + b"x" * MOST_URL_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n"]),
        (b"431", b"headers_too_large", [b"GET /", *[b"x" * 10_000] * 20]),
        (
            b"431",
            b"headers_too_large",
            [POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Trailer: ", *[b"x" * 10_000] * 20],
        ),
        (b"400", b"invalid_http", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"]),
    ],
    ids=["fits", "long", "endless", "many", "url", "endless-url", "trailer", "tls"],
)
def test_the_head_of_a_request_ends(
    sqlite_server: Server, status: bytes, code: bytes, parts: list[bytes]
) -> None:
    """It is refused once it is too long, before all of it has come; a client with no token can do no more."""
    answer = exchange(sqlite_server, *parts)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    assert code in answer
    assert b"x-content-type-options: nosniff" in answer


def test_a_long_body_is_no_long_head(sqlite_server: Server, run: str) -> None:
    """Head and body in one packet, and a body in small chunks, are what they are."""
    body = b" " * 1_000_000
    length = b"Content-Length: 1000000\r\n\r\n"
    assert b"not_json" in exchange(sqlite_server, POST + length + body)
    chunks = [b"64\r\n" + b" " * 100 + b"\r\n"] * 2000
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b"not_json" in exchange(sqlite_server, chunked, *chunks, b"0\r\n\r\n")


def test_series_points_are_bounded(sqlite_server: Server, run: str) -> None:
    """More than may be is refused with the limit, and less is what is given."""
    sqlite_server.post(f"/v1/runs/{run}/blocks", report(some_blocks(200)))
    refused = sqlite_server.get(f"/v1/runs/{run}/series?max_points=2001")
    assert refused.status == 422
    assert "at most 2000" in refused.json()["error"]["message"]
    assert len(sqlite_server.get(f"/v1/runs/{run}/series?max_points=7").json()["points"]) == 7
