"""The HTTP pusher against a real server that is well, down, slow, failing, busy or rude."""

import copy
import logging
import pickle
import socket
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from noisescale.blocks import Block, MomentSums
from noisescale.errors import InvalidInputError
from noisescale.wire import BlocksReport, RunInfo
from noisescale_client import HttpPusher
from noisescale_client.backoff import LONGEST_RETRY_AFTER_S, backoff_s, retry_after_s
from noisescale_client.processes import free_port
from noisescale_client.pusher import MAX_SUMS_PER_REQUEST, combine
from tests.client.wire_server import Reply, error, wire_server

LOGGER = "noisescale_client.pusher"
TOKEN = "s3cret"  # noqa: S105  a test's own


def a_block(step: int, *, groups: int = 1) -> Block:
    sums = tuple(
        MomentSums(
            group="total" if group == 0 else f"layer{group}",
            trace_covariance=40.0,
            true_grad_sq_norm=0.1,
            trace_covariance_sq=160.0,
            true_grad_sq_norm_sq=0.01,
            product=0.4,
        )
        for group in range(groups)
    )
    return Block(
        first_step=step, last_step=step, measured_steps=1, examples=32, global_batch_size=32, sums=sums
    )


def a_report(step: int, *, attempt: int = 1, blocks: int = 1, groups: int = 1) -> BlocksReport:
    return BlocksReport(
        attempt=attempt, seq=step, blocks=tuple(a_block(step + i, groups=groups) for i in range(blocks))
    )


def a_pusher(url: str, **changes: object) -> HttpPusher:
    settings = {"run": "resnet50", "first_wait_s": 0.01, "read_timeout_s": 5.0} | changes
    return HttpPusher(url, **settings)  # type: ignore[arg-type]  # tests name what they change


def test_a_report_arrives_as_the_wire_says() -> None:
    """The request goes to the run's path, with the bearer token, as JSON that parses back to the report."""
    with wire_server() as server:
        pusher = a_pusher(server.url + "/", token=TOKEN)
        pusher.report(a_report(7))
        assert pusher.close(60)
        (request,) = server.requests
        assert (request.method, request.path) == ("POST", "/v1/runs/resnet50/blocks")
        assert request.headers["Authorization"] == "Bearer s3cret"
        assert request.headers["Content-Type"] == "application/json"
        assert "Content-Encoding" not in request.headers
        assert request.report == a_report(7)
        assert pusher.dropped_blocks == 0


def test_large_bodies_are_gzipped() -> None:
    """A report of many blocks travels compressed, and is whole at the other end."""
    with wire_server() as server:
        pusher = a_pusher(server.url)
        pusher.report(a_report(0, blocks=50))
        assert pusher.close(60)
        (request,) = server.requests
        assert request.headers["Content-Encoding"] == "gzip"
        assert len(request.body) < len(request.text) / 4
        assert request.report == a_report(0, blocks=50)


def test_the_token_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without token=, NOISESCALE_TOKEN is sent; a token that cannot be a header never raises."""
    with wire_server() as server:
        monkeypatch.setenv("NOISESCALE_TOKEN", "from-env")
        pusher = a_pusher(server.url)
        pusher.report(a_report(0))
        assert pusher.flush(60)
        assert server.requests[0].headers["Authorization"] == "Bearer from-env"
        monkeypatch.setenv("NOISESCALE_TOKEN", "two\nlines")
        pusher.report(a_report(1))
        assert not pusher.flush(60)
        assert pusher.dropped_blocks == 1
        pusher.close(60)


def test_waiting_reports_share_a_request() -> None:
    """What queues up while a request is under way goes out in one, in order, with the newest run info."""
    with wire_server() as server:
        server.replies = [Reply(status=503)]
        pusher = a_pusher(server.url, first_wait_s=600.0)
        pusher.report(a_report(0))
        server.wait_for_requests(1)
        for step in range(1, 6):
            pusher.report(a_report(step).model_copy(update={"run": RunInfo(every=step)}))
        assert pusher.close(60)
        assert server.first_steps == [[0], [0], [1, 2, 3, 4, 5]]
        assert server.requests[-1].report.run.every == 5
        assert server.requests[-1].report.seq == 5


def test_what_is_combined_and_what_is_not() -> None:
    """Attempts are never mixed, requests stay within 1000 blocks and a size, a farewell is kept."""
    farewell = a_report(1).model_copy(update={"ended": True})
    both = combine(a_report(0), farewell)
    assert both is not None
    assert both.ended
    assert [block.first_step for block in both.blocks] == [0, 1]
    assert combine(a_report(0, attempt=1), a_report(1, attempt=2)) is None
    assert combine(a_report(0, blocks=600), a_report(600, blocks=400)) is not None
    assert combine(a_report(0, blocks=600), a_report(600, blocks=401)) is None
    half = MAX_SUMS_PER_REQUEST // 2 // 50
    assert combine(a_report(0, blocks=half, groups=50), a_report(half, blocks=half, groups=50)) is not None
    assert combine(a_report(0, blocks=half, groups=50), a_report(half, blocks=half + 1, groups=50)) is None


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(error(500, "broken"), id="500"),
        pytest.param(error(502, "no upstream"), id="502"),
        pytest.param(error(429, "too fast"), id="429"),
        pytest.param(Reply(status=202, body=b"{}", cut=0), id="closed-before-the-answer"),
        pytest.param(Reply(status=202, body=b"{}" * 50, cut=120), id="closed-within-the-answer"),
        pytest.param(Reply(status=202, headers={"Content-Encoding": "gzip"}, body=b"{}"), id="not-gzip"),
    ],
)
def test_passing_trouble_is_retried(trouble: Reply, caplog: pytest.LogCaptureFixture) -> None:
    """After three bad answers the report arrives, once and whole; said once, nothing dropped."""
    with wire_server() as server, caplog.at_level(logging.WARNING, logger=LOGGER):
        server.replies = [trouble] * 3
        pusher = a_pusher(server.url)
        pusher.report(a_report(0))
        server.wait_for_requests(4)
        assert pusher.close(60)
        assert server.first_steps == [[0]] * 4
        assert pusher.dropped_blocks == 0
        assert len(caplog.records) == 1
        assert "training goes on" in caplog.text


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 413, 422])
def test_a_refusal_is_not_retried(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """A clear no is asked for once per report, counted, and said once with the server's own words."""
    with wire_server() as server, caplog.at_level(logging.WARNING):
        server.always = error(status, "not like this")
        pusher = a_pusher(server.url)
        pusher.report(a_report(0))
        assert not pusher.flush(60)
        pusher.report(a_report(1))
        assert not pusher.flush(60)
        assert len(server.requests) == 2
        assert pusher.dropped_blocks == 2
        assert len(caplog.records) == 1
        assert ("not like this" if status != 302 else "redirects") in caplog.text
        server.always = None
        pusher.report(a_report(2))
        assert pusher.close(60)
        assert server.requests[-1].report.dropped_blocks == 2


def test_a_report_that_breaks_the_server_is_given_up() -> None:
    """One that is answered 500 ten times is dropped, so that those behind it get through."""
    with wire_server() as server:
        server.replies = [error(500, "poison")] * 10
        pusher = a_pusher(server.url, first_wait_s=0.0)
        pusher.report(a_report(0, attempt=1))
        pusher.report(a_report(1, attempt=2))
        server.wait_for_requests(11)
        pusher.close(60)
        assert server.first_steps == [[0]] * 10 + [[1]]
        assert pusher.dropped_blocks == 1


def test_retry_after_is_honoured() -> None:
    """A 429 that asks for a second gets it, even where a flush is in a hurry."""
    with wire_server() as server:
        server.replies = [error(429, "slow down", headers={"Retry-After": "1"})]
        pusher = a_pusher(server.url)
        pusher.report(a_report(0))
        server.wait_for_requests(1)
        assert pusher.close(60)
        first, second = server.requests
        assert second.at - first.at >= 1.0


def test_a_server_that_is_down_costs_nothing_and_gets_the_rest_later() -> None:
    """With nothing listening: nothing raised, bounded, drops counted; what is kept arrives once it is up."""
    port = free_port()
    pusher = a_pusher(f"http://127.0.0.1:{port}", capacity=10)
    for step in range(1000):
        pusher.report(a_report(step))
    assert not pusher.flush(0.05)
    lost = pusher.dropped_blocks
    assert 980 <= lost <= 989, "10 wait, and 1 to 10 are in the request that is tried again and again"
    with wire_server(port=port) as server:
        assert pusher.flush(60)
        sent = [step for steps in server.first_steps for step in steps]
        assert sent == sorted(sent)
        assert sent[-10:] == list(range(990, 1000))
        assert len(sent) + pusher.dropped_blocks == 1000
        assert server.requests[-1].report.dropped_blocks == lost
        assert pusher.close(60)


def test_reporting_never_waits_for_a_slow_server() -> None:
    """While a server sits on a request, a thousand reports are taken in before it has answered."""
    with wire_server() as server:
        answer = threading.Event()
        server.replies = [Reply(body=b"{}", hold=answer)]
        pusher = a_pusher(server.url, read_timeout_s=60.0)
        pusher.report(a_report(0))
        server.wait_for_requests(1)
        for step in range(1, 1000):
            pusher.report(a_report(step))
        assert not answer.is_set()
        assert len(server.requests) == 1, "all were taken in while the first was still under way"
        answer.set()
        assert pusher.close(60)
        assert pusher.dropped_blocks == 0
        assert [step for steps in server.first_steps for step in steps] == list(range(1000))


def test_a_server_that_never_answers_is_left_alone_in_time() -> None:
    """A port that accepts and says nothing: close answers False in its time and counts the loss."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        pusher = a_pusher(f"http://127.0.0.1:{silent.getsockname()[1]}", read_timeout_s=0.2)
        pusher.report(a_report(0))
        assert not pusher.close(0.5)
        _join_threads_of(pusher)
        assert pusher.dropped_blocks == 1


def test_an_idle_connection_that_the_server_closed_is_no_loss() -> None:
    """A kept-open connection that went away between two reports costs one retry, not a report."""
    with wire_server() as server:
        server.replies = [Reply(status=202, body=b"{}", headers={"Connection": "close"})]
        pusher = a_pusher(server.url)
        pusher.report(a_report(0))
        assert pusher.flush(60)
        pusher.report(a_report(1))
        assert pusher.close(60)
        assert pusher.dropped_blocks == 0
        assert [step for steps in server.first_steps for step in steps] == [0, 1]


def test_close_stops_the_retries() -> None:
    """After close there is no further request, and the thread ends."""
    with wire_server() as server:
        server.always = error(503, "later")
        pusher = a_pusher(server.url)
        pusher.report(a_report(0))
        server.wait_for_requests(2)
        assert not pusher.close(0.05)
        _join_threads_of(pusher)
        count = len(server.requests)
        time.sleep(0.1)
        assert len(server.requests) == count
        assert pusher.dropped_blocks == 1


def test_a_pusher_pickles_without_its_token() -> None:
    """Pickled and deep-copied pushers work, and the token is not among the bytes."""
    with wire_server() as server:
        pusher = a_pusher(server.url, token=TOKEN)
        pusher.report(a_report(0))
        assert pusher.flush(60)
        pickled = pickle.dumps(pusher)
        assert TOKEN.encode() not in pickled
        for copied in (pickle.loads(pickled), copy.deepcopy(pusher)):  # noqa: S301  our own bytes
            copied.report(a_report(1))
            assert copied.close(60)
        assert pusher.close(60)
        assert server.first_steps == [[0], [1], [1]]
        assert "Authorization" not in server.requests[1].headers


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "localhost:8000", "http://", "", "file:x.jsonl", "http://me:pw@host", "http://h:99999"],
)
def test_a_url_that_cannot_be_is_refused_at_once(url: str) -> None:
    """A wrong scheme, no host, a password or a port out of range is an error at construction, by name."""
    with pytest.raises(InvalidInputError, match="the server's URL must") as caught:
        a_pusher(url)
    assert caught.value.field == "url"
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("run", ["", "a/b", "a b", "x" * 129, "naïve"])
def test_a_run_name_that_cannot_be_is_refused_at_once(run: str) -> None:
    """Names are 1 to 128 plain characters; anything else would not be the path that it looks like."""
    with pytest.raises(InvalidInputError, match="a run's name is"):
        a_pusher("http://localhost:8000", run=run)


def test_the_backoff_doubles_up_to_a_limit_with_jitter() -> None:
    """Waits lie between half and all of first x 2^(tries-1), and never above the longest."""
    for tries in (1, 2, 3, 10, 10_000):
        whole = min(8.0, 0.5 * 2.0 ** min(tries - 1, 100))
        waits = [backoff_s(tries, first_s=0.5, longest_s=8.0) for _ in range(200)]
        assert whole / 2 <= min(waits)
        assert max(waits) <= whole
        assert len(set(waits)) > 100


def test_retry_after_in_all_its_forms() -> None:
    """Seconds and dates are read, kept within limits; what is neither is as if it was not there."""
    now = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)

    def read(value: str) -> float | None:
        return retry_after_s({"Retry-After": value}, now=now)

    assert read("7") == 7.0
    assert read("0") == 0.0
    assert read("9" * 400) == LONGEST_RETRY_AFTER_S
    date = (now + timedelta(seconds=90)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert read(date) == 90.0
    assert read("Sun, 01 Mar 2020 12:00:00 GMT") == 0.0
    assert [read(value) for value in ("", "soon", "-3", "1.5", "٣")] == [None] * 5
    assert retry_after_s({}) is None


def _join_threads_of(pusher: HttpPusher) -> None:
    for thread in threading.enumerate():
        if thread.name == f"noisescale to {pusher.url}":
            thread.join(timeout=60)
            assert not thread.is_alive()
