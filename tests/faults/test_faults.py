"""What goes wrong in a machine room: the server recovers by itself, and nothing acknowledged is lost."""

import contextlib
import json
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.load import load
from tests.server.conftest import migrate
from tests.server.reports import report, some_blocks
from tests.server.test_app import run_server_command
from tests.services import (
    Server,
    postgres_to_stop,
    required_tool,
    running_postgres,
    running_server,
    wait_until,
)

KILLS = 25
"""On each of the two databases."""


@pytest.fixture(params=["sqlite", "postgres"])
def fresh_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server of its own, to be maltreated."""
    with ExitStack() as stack:
        settings = {}
        if request.param == "postgres":
            settings["database_url"] = stack.enter_context(running_postgres())
            migrate(settings["database_url"])
        yield stack.enter_context(running_server(tmp_path, **settings))


@pytest.mark.timeout(300)
def test_kills_at_random_moments(fresh_server: Server) -> None:
    """kill -9 under load, again and again: every acknowledged block is there afterwards, exactly once."""
    rng = random.Random(0)
    with load(fresh_server.url) as jobs:
        for _ in range(KILLS):
            before = jobs.total
            wait_until(lambda before=before: jobs.total > before, what="the next acknowledged block")
            time.sleep(rng.uniform(0, 0.1))
            fresh_server.kill()
            fresh_server.start_again()
    assert set(jobs.statuses) == {200}
    assert jobs.total > 4 * KILLS
    jobs.assert_all_there(fresh_server)


def test_postgres_away_for_a_while(tmp_path: Path) -> None:
    """503 with Retry-After, not ready but alive; back to work by itself when the database is."""
    with postgres_to_stop() as postgres:
        migrate(postgres.url)
        with running_server(tmp_path, database_url=postgres.url) as server, load(server.url) as jobs:
            for _ in range(2):
                wait_until(lambda so_far=jobs.total: jobs.total > so_far + 20, what="reports")
                refused = len(jobs.refusals)
                postgres.stop()
                wait_until(lambda refused=refused: len(jobs.refusals) > refused, what="a refusal")
                assert server.get("/readyz").status == 503
                assert server.get("/healthz").status == 200
                for path in ("/v1/runs", "/metrics", "/recommend?run=job-0"):
                    assert server.get(path).status == 503, path
                postgres.start_again()
                wait_until(lambda: server.get("/readyz").status == 200, what="readiness")
            wait_until(lambda so_far=jobs.total: jobs.total > so_far + 20, what="reports")
            jobs.stop()
            assert set(jobs.statuses) == {200, 503}
            assert all("retry-after" in {k.lower() for k in a.headers} for a in jobs.refusals)
            jobs.assert_all_there(server)


def test_a_full_disk(tmp_path: Path) -> None:
    """No file may grow: 503, not ready but alive and readable; with room again, it goes on by itself."""
    with running_server(tmp_path) as server, load(server.url) as jobs:
        wait_until(lambda: jobs.total > 20, what="reports")
        pid = server.process.pid
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
        wait_until(lambda: len(jobs.refusals) > 5, what="refusals")
        assert server.get("/readyz").status == 503
        assert server.get("/healthz").status == 200
        assert server.get("/v1/runs/job-0").status == 200
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        wait_until(lambda so_far=jobs.total: jobs.total > so_far + 20, what="reports again")
        wait_until(lambda: server.get("/readyz").status == 200, what="readiness")
        jobs.stop()
        assert set(jobs.statuses) == {200, 503}
        jobs.assert_all_there(server)
        server.kill()
        server.start_again()
        jobs.assert_all_there(server)


def test_the_clock_goes_back_an_hour(tmp_path: Path) -> None:
    """Reports count on, runs stay on /metrics, and a run's last report is never earlier than it was."""
    required_tool("faketime")
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    offset = tmp_path / "offset"
    offset.write_text("+0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("FAKETIME_TIMESTAMP_FILE", str(offset))
        patch.setenv("FAKETIME_NO_CACHE", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        with running_server(tmp_path / "server") as server:
            patch.undo()
            with load(server.url) as jobs:
                wait_until(lambda: jobs.total > 20, what="reports")
                before = server.get("/v1/runs/job-0").json()
                offset.write_text("-3600")
                wait_until(lambda so_far=jobs.total: jobs.total > so_far + 40, what="reports")
                assert 'run_id="job-0"' in server.get("/metrics").text
                after = server.get("/v1/runs/job-0").json()
                assert after["last_report_at"] >= before["last_report_at"]
                assert after["state"] == "running"
                assert after["measured_steps"] > before["measured_steps"]
                assert server.post("/v1/runs/new/blocks", report(some_blocks(200))).status == 200
                assert 'run_id="new"' in server.get("/metrics").text
                offset.write_text("+0")
                wait_until(lambda so_far=jobs.total: jobs.total > so_far + 20, what="reports")
            assert set(jobs.statuses) == {200}
            jobs.assert_all_there(server)


def test_stalled_and_idle_clients(tmp_path: Path) -> None:
    """100 half heads, 100 half bodies and 1,000 silent connections: reports go on, and health too."""
    body = json.dumps(report(some_blocks(10))).encode()
    head = (
        b"POST /v1/runs/stalled/blocks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 3000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(3000, hard), hard))
    with running_server(tmp_path, body_timeout_s=5) as server, ExitStack() as connections:

        def connect(sent: bytes) -> socket.socket:
            made = connections.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            if sent:
                made.sendall(sent)
            return made

        for _ in range(1000):
            connect(b"")
        for _ in range(100):
            connect(head[:40])
        halves = [connect(head + body[: len(body) // 2]) for _ in range(100)]
        with load(server.url) as jobs:
            wait_until(lambda: jobs.total > 100, what="reports")
            assert server.get("/healthz").status == 200
            assert server.get("/readyz").status == 200
            for half in halves:
                assert half.recv(100).startswith(b"HTTP/1.1 408 ")
        assert set(jobs.statuses) == {200}
        jobs.assert_all_there(server)
        assert server.get("/v1/runs/stalled").status == 404


@contextlib.contextmanager
def round_robin(ports: list[int]) -> Iterator[str]:
    """A balancer that gives each connection to the next port that takes it; its URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    turn = 0

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass  # one side is gone: so is the connection
        finally:
            for end in (source, target):
                with contextlib.suppress(OSError):  # it is shut already
                    end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        nonlocal turn
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            for _ in ports:
                turn += 1
                try:
                    replica = socket.create_connection(("127.0.0.1", ports[turn % len(ports)]), timeout=30)
                    break
                except OSError:
                    continue
            else:
                client.close()
                continue
            for pair in ((client, replica), (replica, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def test_two_replicas_one_killed(tmp_path: Path) -> None:
    """Behind a round-robin, one killed under load: nothing is lost, and both say the same to the byte."""
    with running_postgres() as url, ExitStack() as stack:
        migrate(url)
        first, second = (
            stack.enter_context(running_server(tmp_path / name, database_url=url)) for name in ("a", "b")
        )
        balancer = stack.enter_context(round_robin([first.port, second.port]))
        with load(balancer) as jobs:
            wait_until(lambda: jobs.total > 100, what="reports")
            second.kill()
            wait_until(lambda so_far=jobs.total: jobs.total > so_far + 60, what="reports")
            second.start_again()
            wait_until(lambda so_far=jobs.total: jobs.total > so_far + 60, what="reports")
        assert set(jobs.statuses) == {200}
        jobs.assert_all_there(first)
        for path in ("/metrics", "/recommend?run=job-1", "/v1/runs"):
            pages = [server.get(path) for server in (first, second)]
            assert pages[0].status == 200
            assert pages[0].body == pages[1].body, path


def test_several_workers_one_killed(tmp_path: Path) -> None:
    """Two processes at one port: both answer alike, one that dies is started anew, and nothing is lost."""
    with running_postgres() as url:
        migrate(url)
        with running_server(tmp_path, workers=2, database_url=url) as server:
            with load(server.url) as jobs:
                wait_until(lambda: jobs.total > 60, what="reports")
                before = workers_of(server)
                assert len(before) == 2
                os.kill(before[0], signal.SIGKILL)
                wait_until(lambda: len(set(workers_of(server)) - {before[0]}) == 2, what="another worker")
                wait_until(lambda so_far=jobs.total: jobs.total > so_far + 60, what="reports")
            assert set(jobs.statuses) == {200}
            jobs.assert_all_there(server)
            for path in ("/metrics", "/recommend?run=job-1"):
                assert len({server.get(path).body for _ in range(20)}) == 1, path


def workers_of(server: Server) -> list[int]:
    """Process ids of its workers."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def test_sqlite_has_one_process(tmp_path: Path) -> None:
    """Several workers on SQLite are refused, and it says what to do."""
    url = f"sqlite:///{tmp_path / 'noisescale.db'}"
    done = run_server_command("serve", "--workers", "2", NOISESCALE_DATABASE_URL=url)
    assert done.returncode != 0
    assert "--workers 2 needs PostgreSQL" in " ".join(done.stderr.split())
