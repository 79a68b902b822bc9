"""What jobs report is stored once, whole, or not at all."""

import concurrent.futures
import gzip
import json
from typing import Any

import pytest

from tests.server.reports import ATTEMPT, report, some_blocks, sums_of
from tests.services import Server

INGEST = "/v1/runs/{}/blocks"


def stored(server: Server, run: str) -> dict[str, Any]:
    """What the server says of a run."""
    answer = server.get(f"/v1/runs/{run}")
    assert answer.status == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def send(server: Server, run: str, body: dict[str, Any]) -> dict[str, Any]:
    """One report that is accepted."""
    answer = server.post(INGEST.format(run), body)
    assert answer.status == 200, answer.text
    accepted: dict[str, Any] = answer.json()
    return accepted


def test_sent_twice_is_stored_once(server: Server, run: str) -> None:
    """The second time every block is a duplicate, and nothing changes but the time of the last report."""
    blocks = some_blocks()
    assert send(server, run, report(blocks)) == {"accepted": 20, "duplicates": 0, "last_step": 199}
    before = stored(server, run)
    assert send(server, run, report(blocks)) == {"accepted": 0, "duplicates": 20, "last_step": 199}
    after = stored(server, run)
    assert before.pop("last_report_at") <= after.pop("last_report_at")
    assert after == before


def test_estimate_is_of_the_sums(server: Server, run: str) -> None:
    """The noise scale is the ratio of the stored sums."""
    blocks = some_blocks()
    send(server, run, report(blocks[:7]))
    send(server, run, report(blocks[7:], seq=1))
    trace, signal, steps = sums_of(blocks)
    found = stored(server, run)
    assert found["noise_scale"] == pytest.approx(trace / signal, rel=1e-9)
    assert found["lower"] < found["noise_scale"] < found["upper"]
    assert (found["measured_steps"], found["steps"], found["examples"]) == (steps, 200, 200 * 64)


def test_order_of_reports_does_not_matter(server: Server, run: str) -> None:
    """Blocks that come late find their place."""
    blocks = some_blocks()
    send(server, run, report(blocks[10:]))
    send(server, run, report(blocks[:4], seq=1))
    send(server, run, report(blocks[4:10], seq=2))
    in_order = run[:100] + "-in-order"
    send(server, in_order, report(blocks))
    one, other = stored(server, run), stored(server, in_order)
    for field in ("noise_scale", "lower", "upper", "measured_steps", "examples", "last_step"):
        assert one[field] == pytest.approx(other[field], rel=1e-12), field


def test_overlapping_block_is_a_duplicate(server: Server, run: str) -> None:
    """A block that covers a step its attempt has stored is left out; the others of its report are not."""
    blocks = some_blocks()
    send(server, run, report(blocks[:3]))
    wider = json.loads(blocks[2].model_dump_json()) | {"first_step": 25, "last_step": 34}
    body = report(blocks[4:5], seq=1)
    body["blocks"].insert(0, wider)
    assert send(server, run, body) == {"accepted": 1, "duplicates": 1, "last_step": 49}


def test_new_attempt_supersedes_what_it_repeats(server: Server, run: str) -> None:
    """A job restarted from step 100 replaces the steps from there on; earlier ones stay."""
    first, second = some_blocks(seed=1), some_blocks(100, seed=2, first_step=100)
    send(server, run, report(first))
    send(server, run, report(second, attempt=ATTEMPT + 1))
    trace, signal, steps = sums_of([*first[:10], *second])
    found = stored(server, run)
    assert (found["attempts"], found["measured_steps"]) == ([ATTEMPT, ATTEMPT + 1], steps)
    assert found["noise_scale"] == pytest.approx(trace / signal, rel=1e-9)
    # What the first attempt sends late does not come back.
    send(server, run, report(some_blocks(50, seed=3, first_step=200), seq=1))
    assert stored(server, run)["noise_scale"] == pytest.approx(trace / signal, rel=1e-9)


def test_gzipped_body(server: Server, run: str) -> None:
    """Content-Encoding: gzip is understood."""
    body = gzip.compress(json.dumps(report(some_blocks())).encode())
    answer = server.post(INGEST.format(run), body, Content_Encoding="gzip")
    assert answer.status == 200
    assert answer.json()["accepted"] == 20


def test_unknown_fields_pass(server: Server, run: str) -> None:
    """A newer client's extra fields are no error."""
    body = report(some_blocks(), future={"x": 1}, run={"colour": "red"})
    body["blocks"][0]["kurtosis"] = 3
    body["blocks"][0]["sums"][0]["kurtosis"] = 3
    assert send(server, run, body)["accepted"] == 20


def test_farewell_and_heartbeat(server: Server, run: str) -> None:
    """Reports without blocks say that the job lives, or has ended; drops are told."""
    send(server, run, report(some_blocks()))
    send(server, run, report(seq=1, dropped_blocks=3))
    assert (stored(server, run)["state"], stored(server, run)["dropped_blocks"]) == ("running", 3)
    send(server, run, report(seq=2, ended=True))
    assert stored(server, run)["state"] == "ended"


def test_many_senders_at_once(server: Server, run: str) -> None:
    """64 reports of 8 runs on 16 connections, each sent twice, are each stored once."""
    blocks = some_blocks(80)

    def post(index: int) -> dict[str, Any]:
        part = index % 8
        return send(server, f"{run[:100]}-{index // 8 % 8}", report(blocks[part : part + 1], seq=part))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(post, [*range(64), *range(64)]))
    assert sum(answer["accepted"] for answer in answers) == 64
    assert sum(answer["duplicates"] for answer in answers) == 64
    for index in range(8):
        found = stored(server, f"{run[:100]}-{index}")
        assert (found["measured_steps"], found["last_step"]) == (80, 79)


BLOCK = report(some_blocks(10))["blocks"][0]


def with_block(**fields: Any) -> dict[str, Any]:
    return report() | {"blocks": [BLOCK | fields]}


def with_sums(**fields: Any) -> dict[str, Any]:
    return with_block(sums=[BLOCK["sums"][0] | fields])


def raw(text: str) -> bytes:
    """The report with a number replaced by what json.dumps would not write."""
    return json.dumps(with_sums(trace_covariance=12345678)).replace("12345678", text).encode()


BAD: dict[str, tuple[Any, int, str]] = {
    "nan": (raw("NaN"), 422, "trace_covariance"),
    "infinity": (raw("Infinity"), 422, "trace_covariance"),
    "minus-infinity": (raw("-Infinity"), 422, "trace_covariance"),
    "1e999": (raw("1e999"), 422, "trace_covariance"),
    "400-digit-float": (raw("9" * 400), 422, "trace_covariance"),
    "400-digit-step": (
        json.dumps(with_block(last_step=12345678)).replace("12345678", "9" * 400).encode(),
        422,
        "last_step",
    ),
    "negative-steps": (with_block(measured_steps=-1), 422, "measured_steps"),
    "negative-examples": (with_block(examples=-1), 422, "examples"),
    "negative-batch": (with_block(global_batch_size=-64), 422, "global_batch_size"),
    "zero-batch": (with_block(global_batch_size=0), 422, "global_batch_size"),
    "negative-rate": (with_block(learning_rate=-0.1), 422, "learning_rate"),
    "negative-square": (with_sums(trace_covariance_sq=-1.0), 422, "trace_covariance_sq"),
    "step-too-large": (with_block(last_step=2**60), 422, "last_step"),
    "backwards-in-a-block": (with_block(first_step=10, last_step=9), 422, "run backwards"),
    "backwards-blocks": (report() | {"blocks": [BLOCK, BLOCK]}, 422, "run backwards"),
    "more-steps-than-there-are": (with_block(measured_steps=11), 422, "exceed"),
    "no-sums": (with_block(sums=[]), 422, "sums is empty"),
    "same-group-twice": (with_block(sums=BLOCK["sums"] * 2), 422, "twice"),
    "unknown-geometry": (with_sums(geometry="hyperbolic"), 422, "geometry"),
    "bad-group": (with_sums(group="a b"), 422, "group"),
    "wrong-type": (with_block(first_step="zero"), 422, "first_step"),
    "fraction-of-a-step": (with_block(first_step=0.5), 422, "first_step"),
    "no-attempt": ({k: v for k, v in report().items() if k != "attempt"}, 422, "attempt"),
    "negative-attempt": (report(attempt=-1), 422, "attempt"),
    "newer-schema": (report() | {"schema_version": 2}, 422, "schema"),
    "huge-schema": (
        json.dumps(report() | {"schema_version": 1})
        .replace('"schema_version": 1', '"schema_version": ' + "9" * 400)
        .encode(),
        422,
        "schema",
    ),
    "zero-schema": (report() | {"schema_version": 0}, 422, "schema_version"),
    "too-many-labels": (report(run={"labels": {f"k{i}": "v" for i in range(33)}}), 422, "labels"),
    "long-label": (report(run={"labels": {"k": "v" * 10_000}}), 422, "labels"),
    "bad-label-name": (report(run={"labels": {"a b": "v"}}), 422, "labels"),
    "momentum": (report(run={"momentum": 1.0}), 422, "momentum"),
    "list": ([1, 2], 422, ""),
    "number": (b"3", 422, ""),
    "not-json": (b'{"attempt": 1,', 400, "not JSON"),
    "empty": (b"", 400, "not JSON"),
    "not-utf8": (b'{"attempt": "\xff\xfe"}', 400, ""),
    "10-mb": (b" " * 10_000_000, 413, "bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_reports_change_nothing(sqlite_server: Server, run: str, kind: str) -> None:
    """Each kind of bad report is a 4xx that names what is wrong, does not echo it, and stores nothing."""
    server = sqlite_server
    body, status, words = BAD[kind]
    answer = server.post(INGEST.format(run), body)
    assert answer.status == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"] + " ".join(error["fields"])
    assert len(answer.body) < 2000
    assert server.get(f"/v1/runs/{run}").status == 404  # not even the run is there


@pytest.mark.parametrize("kind", ["nan", "backwards-blocks", "newer-schema", "10-mb"])
def test_bad_reports_leave_a_run_as_it_was(server: Server, run: str, kind: str) -> None:
    """A run that is there keeps what it has, and takes the next good report."""
    blocks = some_blocks()
    send(server, run, report(blocks[:10]))
    before = stored(server, run)
    assert server.post(INGEST.format(run), BAD[kind][0]).status == BAD[kind][1]
    assert stored(server, run) == before
    assert send(server, run, report(blocks[10:], seq=1))["accepted"] == 10


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "x" * 129, "%00", "%F0%9F%98%80", "a:b"])
def test_wrong_run_names(sqlite_server: Server, name: str) -> None:
    """A name of other characters, or too long, is refused with the rule."""
    answer = sqlite_server.post(INGEST.format(name), report(some_blocks(10)))
    assert answer.status in (404, 422), answer.text
    if answer.status == 422:
        assert "128 letters" in answer.json()["error"]["message"]


def test_gzip_that_is_none(sqlite_server: Server, run: str) -> None:
    """Broken gzip, half of it, another encoding, and a bomb are each told apart."""
    good = gzip.compress(json.dumps(report(some_blocks(10))).encode())
    url = INGEST.format(run)
    for body, encoding, status in [
        (b"no gzip", "gzip", 400),
        (good[: len(good) // 2], "gzip", 400),
        (good, "br", 415),
        (gzip.compress(b" " * 50_000_000), "gzip", 413),
    ]:
        assert sqlite_server.post(url, body, Content_Encoding=encoding).status == status
    assert sqlite_server.get(f"/v1/runs/{run}").status == 404
