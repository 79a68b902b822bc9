"""What was acknowledged is there after any end of the process."""

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
