"""What the log says, and what it never does."""

import json
import sqlite3
from pathlib import Path

import pytest

from noisescale_server.settings import Settings
from tests.server.reports import report, some_blocks
from tests.services import Server, http, running_server, wait_until

WRITER = "a-token-that-nobody-may-see-1234"
LABEL = "a-label-that-is-nobodys-business"


def spoil(folder: Path) -> None:
    """Make what is stored of all runs such that evaluating it raises what nobody expects."""
    with sqlite3.connect(folder / "noisescale.db") as connection:
        connection.execute("UPDATE runs SET last_report_at = 'never'")
    connection.close()


@pytest.mark.parametrize("log_json", ["true", "false"])
def test_unexpected_errors_are_logged_without_token_and_body(tmp_path: Path, log_json: str) -> None:
    """One in an endpoint, one in the writer: type and place are in the log; what was sent is not."""
    with running_server(tmp_path, write_tokens=WRITER, log_json=log_json) as server:
        sent = {"Authorization": f"Bearer {WRITER}"}
        blocks = some_blocks(20)
        assert server.post("/v1/runs/a/blocks", report(blocks[:1]), **sent).status == 200
        spoil(tmp_path)
        failed = server.get(f"/v1/runs/a?secret={LABEL}", **sent)
        assert (failed.status, failed.json()["error"]["code"]) == (500, "internal")
        refused = server.post("/v1/runs/a/blocks", report(blocks[1:], run={"labels": {"k": LABEL}}), **sent)
        assert refused.status == 503
        log = wait_until(lambda: _with(server, "request failed", "commit failed"), what="both in the log")
    assert log.count("TypeError") >= 2
    assert "standing.py" in log
    assert WRITER not in log
    assert LABEL not in log
    assert "Traceback" not in log  # nor from a library that writes by itself
    if log_json == "true":
        lines = [json.loads(line) for line in log.splitlines()]
        (line,) = [line for line in lines if line["event"] == "request failed"]
        assert line["request_id"] == {k.lower(): v for k, v in failed.headers.items()}["x-request-id"]


def _with(server: Server, *words: str) -> str | None:
    log = server.log.read_text()
    return log if all(word in log for word in words) else None


def test_errors_never_repeat_what_was_sent(tmp_path: Path) -> None:
    """Whatever part of a request is wrong, neither answer nor log repeats it."""
    canary = "noisescale_" + "c4n4ry" * 7 + "x"
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    with running_server(tmp_path, write_tokens=WRITER, log_level="debug") as server:
        token = {"Authorization": f"Bearer {WRITER}"}
        body = report(some_blocks(10))
        answers = {
            "token": server.get("/v1/runs", Authorization=f"Bearer {canary}"),
            "basic": server.get("/v1/runs", Authorization=f"Basic {canary}"),
            "cookie": server.get("/v1/runs", Cookie=f"noisescale_token={canary}"),
            "sign-in": server.post("/sign-in", f"token={canary}&next=/".encode(), **form),
            "run": server.get(f"/v1/runs/{canary}", **token),
            "page": server.get(f"/runs/{canary}", **token),
            "name": server.post(f"/v1/runs/{canary}%20/blocks", body, **token),
            "address": server.get(f"/{canary}", **token),
            "method": http(canary.upper(), server.url + "/v1/runs", headers=token),
            "query": server.get(f"/recommend?run=a&{canary}=1", **token),
            "value": server.get(f"/v1/runs?limit={canary}", **token),
            "value of a page": server.get(f"/?sort={canary}", **token),
            "plan": server.get(f"/plan?run={canary}", **token),
            "encoding": server.post("/v1/runs/a/blocks", body, **token, Content_Encoding=canary),
            "json": server.post("/v1/runs/a/blocks", canary.encode(), **token),
            "field": server.post("/v1/runs/a/blocks", report(run={"optimizer": canary}), **token),
            "label": server.post("/v1/runs/a/blocks", report(run={"labels": {f"{canary} ": ""}}), **token),
            "advice": server.post("/recommend", {"optimizer": canary}, **token),
        }
        log = server.log.read_text()
    for kind, answer in answers.items():
        assert 400 <= answer.status < 500, (kind, answer.status)
        assert canary not in answer.text, kind
        assert WRITER not in answer.text, kind
    assert canary not in log
    assert WRITER not in log


@pytest.mark.parametrize("value", ["1", "sqlite", "http://user:hidden-hidden@host/"])
def test_a_wrong_setting_is_not_repeated(value: str) -> None:
    """Its error names the variable's rule alone: the value may be a secret."""
    with pytest.raises(ValueError, match="database_url must be") as caught:
        Settings(database_url=value)
    assert "hidden-hidden" not in str(caught.value)
