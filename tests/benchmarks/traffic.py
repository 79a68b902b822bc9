"""What is sent: reports as jobs send them, and the same runs as they would be pushed to a pushgateway."""

import json
from dataclasses import dataclass, field

from tests.benchmarks.load import request_bytes
from tests.server.reports import report, some_blocks
from tests.services import Server

STEPS_PER_BLOCK = 10


class _Turns:
    """Which run is next on each connection; a run is always sent over the same one, as a job does."""

    def __init__(self, runs: int, connections: int) -> None:
        self._runs, self._connections = runs, connections
        self._next_of = [connection % runs for connection in range(connections)]

    def take(self, connection: int) -> int:
        run = self._next_of[connection]
        following = run + self._connections
        self._next_of[connection] = following if following < self._runs else connection % self._runs
        return run


@dataclass
class Reports:
    """Requests of many runs, each run's own in step order.

    Attributes:
        runs: How many runs there are.
        connections: Over how many connections.
        blocks: In each report.
        sent: Reports that each run has sent before.
        headers: Further ones of every request, each with its line end.
    """

    runs: int
    connections: int
    blocks: int = 20
    sent: int = 0
    headers: str = ""
    _template: str = field(init=False, repr=False)
    _turns: _Turns = field(init=False, repr=False)
    _sent: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        body = report(some_blocks(STEPS_PER_BLOCK * self.blocks))
        for block in body["blocks"]:
            block["first_step"] = block["last_step"] = "STEP"
        self._template = json.dumps(body, separators=(",", ":")).replace('"STEP"', "%d")
        self._turns = _Turns(self.runs, self.connections)
        self._sent = [self.sent] * self.runs

    def next_request(self, connection: int) -> bytes:
        """The next report of the next run of this connection."""
        run = self._turns.take(connection)
        number = self._sent[run]
        self._sent[run] = number + 1
        return request_bytes(
            "POST", f"/v1/runs/{self.name(run)}/blocks", self.body(number), headers=self.headers
        )

    def body(self, number: int) -> bytes:
        """A run's report of that number, from 0."""
        firsts = range(
            number * STEPS_PER_BLOCK * self.blocks,
            (number + 1) * STEPS_PER_BLOCK * self.blocks,
            STEPS_PER_BLOCK,
        )
        steps = [step for first in firsts for step in (first, first + STEPS_PER_BLOCK - 1)]
        return (self._template % tuple(steps)).encode()

    def name(self, run: int) -> str:
        """A run's."""
        return f"run-{run:05}"


class Pushes:
    """Requests to a pushgateway: every group holds one run's series, and is replaced by each push.

    Args:
        body: The series, as pushed_form gives them.
    """

    def __init__(self, body: bytes, *, groups: int, connections: int) -> None:
        self._body = body
        self._turns = _Turns(groups, connections)

    def next_request(self, connection: int) -> bytes:
        """The next push of this connection."""
        group = self._turns.take(connection)
        return request_bytes("PUT", f"/metrics/job/run-{group:05}", self._body, kind="text/plain")


def pushed_form(server: Server, run: str) -> bytes:
    """One run's series on /metrics as a job would push them: without the label that names the run."""
    lines: list[bytes] = []
    label = f'run_id="{run}"'.encode()
    for line in server.get("/metrics").body.splitlines():
        if line.startswith(b"# TYPE"):
            lines.append(line)
        elif label in line:
            lines.append(line.replace(label + b",", b"").replace(b"{" + label + b"}", b""))
    return b"\n".join(lines) + b"\n"
