"""Reports that hypothesis makes up: whatever is sent, the server answers, and stores all of it or nothing."""

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.reports import report, some_blocks
from tests.services import Server, http, running_server

FIRST = report(some_blocks(30))
NEXT = json.dumps(report(some_blocks(30, first_step=30), seq=1, run={"labels": {"team": "a"}, "tuned": None}))
NAMES = (f"fuzz-{number}" for number in itertools.count())
FUZZED = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=120
)
NUMBERS = (
    st.sampled_from(
        [0, -1, 1, 2**31, 2**53, 2**63, 10**400, 0.5, -0.0, 5e-324, 1e70, 1.1e70, 1e308, math.inf, math.nan]
    )
    | st.integers()
    | st.floats()
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def fuzzed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own on each database, which may be filled with odd runs."""
    options: dict[str, Any] = {"max_requests_per_s": 0}
    if request.param == "postgres":
        options["database_url"] = request.getfixturevalue("postgres_url")
    with running_server(tmp_path_factory.mktemp("fuzz"), **options) as server:
        yield server


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a report, containers too."""
    inner: list[tuple[Any, ...]] = []
    if isinstance(node, dict):
        inner = [found for key, value in node.items() for found in places(value, (*path, key))]
    elif isinstance(node, list):
        inner = [found for index, value in enumerate(node) for found in places(value, (*path, index))]
    return [path, *inner] if path else inner


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A valid report in which one to three values were replaced, scaled, removed or doubled."""
    body: dict[str, Any] = json.loads(NEXT)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(places(body)))
        node: Any = body
        for part in parents:
            node = node[part]
        change = draw(st.sampled_from(["replace", "number", "remove", "double", "add"]))
        if change == "replace":
            node[last] = draw(ANYTHING)
        elif change == "number" and isinstance(node[last], int | float):
            node[last] = draw(NUMBERS)
        elif change == "remove":
            del node[last]
        elif change == "double" and isinstance(node, list):
            node.append(node[last])
        elif change == "add" and isinstance(node, dict):
            node[draw(st.text(max_size=10))] = draw(ANYTHING)
    return body


def stored(server: Server, run: str) -> tuple[int, Any]:
    """All that the server has of a run, but for the time of its last report."""
    answer = server.get(f"/v1/runs/{run}")
    body = answer.json()
    body.pop("last_report_at", None)
    return answer.status, body


def check(server: Server, run: str, body: bytes) -> None:
    """Send a report to a run that is there: a 4xx changes nothing, and nothing that is read is a 5xx."""
    before = stored(server, run)
    answer = server.post(f"/v1/runs/{run}/blocks", body)
    assert answer.status < 500, answer.text
    after = stored(server, run)
    if answer.status != 200:
        assert answer.json()["error"]["message"]
        assert after == before
    assert after[0] in (200, 409), after
    for path in (
        f"/v1/runs/{run}/series",
        f"/recommend?run={run}",
        f"/runs/{run}",
        f"/runs/{run}/charts.json",
    ):
        found = http("GET", server.url + path)
        assert found.status < 500, (path, found.text)
        assert b"NaN" not in found.body
    assert server.get("/metrics").status == 200


@FUZZED
@given(body=mutated())
def test_changed_reports(fuzzed: Server, body: dict[str, Any]) -> None:
    """A report that is nearly right, as a newer, older or broken client may send it."""
    run = next(NAMES)
    assert fuzzed.post(f"/v1/runs/{run}/blocks", FIRST).status == 200
    check(fuzzed, run, json.dumps(body).encode("utf-8", errors="surrogatepass"))


@FUZZED
@given(
    body=st.binary(max_size=200)
    | st.tuples(st.integers(0, len(NEXT)), st.binary(max_size=8), st.integers(0, 30)).map(
        lambda cut: NEXT[: cut[0]].encode() + cut[1] + NEXT[cut[0] + cut[2] :].encode()
    )
)
def test_raw_bytes(fuzzed: Server, body: bytes) -> None:
    """Bytes that are no JSON, and a report with some of its bytes replaced."""
    run = next(NAMES)
    assert fuzzed.post(f"/v1/runs/{run}/blocks", FIRST).status == 200
    check(fuzzed, run, body)
