"""What was acknowledged is there after any end of the process."""

import concurrent.futures
import signal
import threading
from pathlib import Path

import pytest

from tests.server.conftest import migrate
from tests.server.reports import report, some_blocks
from tests.services import Server, running_postgres, running_server, stop

ENDED = (0, -signal.SIGTERM)
"""Of a server that was told to end and did: it dies of the very signal, after its work is done."""


@pytest.fixture(params=["sqlite", "postgres"])
def fresh_server(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]  # a generator
    """A server of its own, to be killed."""
    if request.param == "sqlite":
        with running_server(tmp_path) as server:
            yield server
        return
    with running_postgres() as url:
        migrate(url)
        with running_server(tmp_path, database_url=url) as server:
            yield server


def acknowledged_until_killed(server: Server, *, after: int) -> list[tuple[str, int]]:
    """8 senders at once; the server is killed when so many reports are answered. What was answered 200."""
    blocks = some_blocks(1000)
    answered: list[tuple[str, int]] = []
    lock, enough = threading.Lock(), threading.Event()

    def sender(number: int) -> None:
        for index, block in enumerate(blocks):
            try:
                answer = server.post(f"/v1/runs/job-{number}/blocks", report([block], seq=index))
            except OSError:
                return  # it is gone
            assert answer.status == 200, answer.text
            with lock:
                answered.append((f"job-{number}", block.last_step))
                if len(answered) >= after:
                    enough.set()

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        senders = [pool.submit(sender, number) for number in range(8)]
        enough.wait(60)
        server.kill()
        for done in senders:
            done.result()
    return answered


def test_kill_loses_nothing_acknowledged(fresh_server: Server) -> None:
    """kill -9 under load, twice: every acknowledged block is there, once, and the rest can be sent again."""
    answered: set[tuple[str, int]] = set()
    for after in (40, 25):
        answered |= set(acknowledged_until_killed(fresh_server, after=after))
        fresh_server.start_again()
        for name in {name for name, _ in answered}:
            found = fresh_server.get(f"/v1/runs/{name}").json()
            wanted = {step for run, step in answered if run == name}
            assert found["last_step"] >= max(wanted)
            assert (
                found["measured_steps"] == found["last_step"] + 1
            )  # sent in order: no step twice or missing
    again = fresh_server.post("/v1/runs/job-0/blocks", report(some_blocks(1000)))
    accepted = again.json()
    assert accepted["accepted"] + accepted["duplicates"] == 100
    found = fresh_server.get("/v1/runs/job-0").json()
    assert (found["measured_steps"], found["last_step"]) == (1000, 999)


def test_restart_answers_alike(fresh_server: Server) -> None:
    """Stopped and started again, the server says the same of a run, in numbers and in advice."""
    fresh_server.post("/v1/runs/job/blocks", report(some_blocks(600)))
    before = [fresh_server.get(path).json() for path in ("/v1/runs/job", "/recommend?run=job")]
    assert stop(fresh_server.process) in ENDED
    fresh_server.start_again()
    assert [fresh_server.get(path).json() for path in ("/v1/runs/job", "/recommend?run=job")] == before


def test_termination_drains(fresh_server: Server) -> None:
    """SIGTERM under load: what is answered 200 is stored, and the process ends by itself."""
    blocks = some_blocks(1000)
    answered: list[int] = []
    begun = threading.Event()

    def sender() -> None:
        for index, block in enumerate(blocks):
            try:
                answer = fresh_server.post("/v1/runs/job/blocks", report([block], seq=index))
            except OSError:
                return
            if answer.status != 200:
                return
            answered.append(block.last_step)
            if len(answered) >= 10:
                begun.set()

    thread = threading.Thread(target=sender)
    thread.start()
    assert begun.wait(60)
    assert stop(fresh_server.process) in ENDED
    thread.join(30)
    fresh_server.start_again()
    assert fresh_server.get("/v1/runs/job").json()["last_step"] >= max(answered)
