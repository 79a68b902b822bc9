"""Jobs that report over real HTTP, and send again what was not acknowledged, as the client does."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.reports import report, some_blocks
from tests.services import Answer, Server, http

BLOCKS = some_blocks(20_000)
JOBS = 4


class Load:
    """Each job sends its blocks one by one, the next after the last was acknowledged.

    Attributes:
        acknowledged: Of each run, how many blocks were answered 200.
        statuses: How often each status was answered.
        refusals: Answers that were not 200.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._job, args=(f"job-{n}",)) for n in range(JOBS)]
        self.acknowledged: Counter[str] = Counter({f"job-{n}": 0 for n in range(JOBS)})
        self.statuses: Counter[int] = Counter()
        self.refusals: list[Answer] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    @property
    def total(self) -> int:
        return sum(self.acknowledged.values())

    def _job(self, run: str) -> None:
        while not self._stopping.is_set():
            done = self.acknowledged[run]
            block = BLOCKS[done]
            try:
                answer = self._send(run, report([block], seq=done))
            except OSError:  # not there: it may have been stored, or not
                time.sleep(0.02)
                continue
            self.statuses[answer.status] += 1
            if answer.status == 200:
                self.acknowledged[run] = done + 1
            else:
                self.refusals.append(answer)
                time.sleep(0.02)

    def _send(self, run: str, body: dict[str, Any]) -> Answer:
        return post(f"{self._url}/v1/runs/{run}/blocks", body)

    def assert_all_there(self, server: Server) -> None:
        """What was acknowledged is stored, once; and nothing else but the one block that was under way."""
        for run, count in self.acknowledged.items():
            if not count:
                continue
            found = server.get(f"/v1/runs/{run}").json()
            assert found["last_step"] + 1 == found["measured_steps"] == found["steps"]
            assert found["measured_steps"] in (10 * count, 10 * (count + 1)), run


@contextmanager
def load(url: str) -> Iterator[Load]:
    """Jobs that report until the end of the block."""
    running = Load(url)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def post(url: str, body: dict[str, Any]) -> Answer:
    """One POST of JSON."""
    return http("POST", url, body=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
