"""Reports of a training job to a server over HTTP, without the job noticing.

Whatever the server does (down, slow, answering 500) costs the training thread nothing but an
append to a bounded queue. Sending one report twice is harmless, so whatever was not clearly
answered is sent again; whatever was clearly refused is not.
"""

import gzip
import logging
import re
from http import HTTPStatus
from typing import Any

from noisescale.errors import InvalidInputError
from noisescale.sinks import BackgroundSink
from noisescale.wire import MAX_BLOCKS_PER_REPORT, BlocksReport
from noisescale_client.answers import error_of
from noisescale_client.backoff import backoff_s, retry_after_s
from noisescale_client.errors import RequestRefusedError, ServerUnreachableError
from noisescale_client.transport import Answer, Transport, check_url

_log = logging.getLogger(__name__)

GZIP_FROM_BYTES = 1024
MAX_SUMS_PER_REQUEST = 2000
"""Entries of block sums in one combined request: keeps its body under 1 MB with many layer groups."""

MAX_TRIES_ON_ERROR = 10
"""Tries at a report that the server answers with 5xx each time; what makes it fail may be the report."""

_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class HttpPusher:
    """A sink that posts reports to `POST {url}/v1/runs/{run}/blocks`.

    No answer, 429 and 503 are tried again until close(); any other 5xx up to 10 times; other
    answers of 4xx not at all. The wait between tries doubles up to half a minute, or is what
    Retry-After asks. What is given up or falls off the queue is counted in `dropped_blocks`,
    which later reports carry to the server.

    Args:
        url: The server's, http:// or https://.
        run: The run's name, 1 to 128 letters, digits, dots, underscores and hyphens.
        token: Write token; None reads NOISESCALE_TOKEN. Not part of a pickled pusher.
        capacity: Reports that may wait; one more drops the oldest.
        connect_timeout_s, read_timeout_s: Longest waits for a connection and for an answer.
        first_wait_s: Wait after the first failed try; doubles with each further one.

    Raises:
        InvalidInputError: The URL or the run name cannot be right.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        token: str | None = None,
        capacity: int = 1024,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 10.0,
        first_wait_s: float = 0.5,
    ) -> None:
        if not _RUN_NAME.fullmatch(run):
            raise InvalidInputError(
                f"a run's name is 1 to 128 letters, digits, dots, underscores and hyphens, got {run[:140]!r}",
                field="run",
            )
        self.url = check_url(url)
        self.run = run
        self._first_wait_s = first_wait_s
        self._timeouts_s = (connect_timeout_s, read_timeout_s)
        self._transport = self._new_transport(token)
        self._outage_said = False
        self._sink = BackgroundSink(self._deliver, name=self.url, capacity=capacity, combine=combine)

    def report(self, report: BlocksReport) -> None:
        """Take one report in; sent later, on another thread. Never waits and never raises."""
        self._sink.report(report)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was taken in is acknowledged; whether it was, in time."""
        return self._sink.flush(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush and stop; what is not acknowledged in time is dropped and counted."""
        return self._sink.close(timeout_s)

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were taken in and will never reach the server."""
        return self._sink.dropped_blocks

    def __getstate__(self) -> dict[str, Any]:
        # A token would end up in every checkpoint that holds the model; connections cannot be pickled.
        return {key: value for key, value in self.__dict__.items() if key != "_transport"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._transport = self._new_transport(None)

    def _new_transport(self, token: str | None) -> Transport:
        connect_timeout_s, read_timeout_s = self._timeouts_s
        return Transport(
            self.url, token=token, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s
        )

    def _deliver(self, report: BlocksReport) -> None:
        """Send one report, for as long as it may yet be taken. On the sink's own thread.

        Raises:
            RequestRefusedError: The server will not have it.
            ServerUnreachableError: The sink closed before there was an answer.
        """
        body, headers = encode(report)
        tries = 0
        while True:
            tries += 1
            answer: Answer | None = None
            problem: RequestRefusedError | ServerUnreachableError | None
            try:
                answer = self._transport.exchange(
                    "POST", f"/v1/runs/{self.run}/blocks", body=body, headers=headers
                )
                problem = error_of(answer)
            except ServerUnreachableError as unreachable:
                problem = unreachable
            if problem is None:
                return
            if answer is not None and not _may_yet_succeed(answer.status, tries=tries):
                raise problem
            self._say_outage(problem)
            asked = retry_after_s(answer.headers) if answer is not None else None
            wait = backoff_s(tries, first_s=self._first_wait_s) if asked is None else asked
            if not self._sink.pause(wait, may_hurry=asked is None):
                raise problem

    def _say_outage(self, problem: RequestRefusedError | ServerUnreachableError) -> None:
        if not self._outage_said:
            self._outage_said = True
            what = problem.cause if isinstance(problem, ServerUnreachableError) else problem
            _log.warning(
                "noisescale cannot reach %s now (%s); training goes on, and reports are kept and "
                "tried again (said once)",
                self.url,
                what,
            )


def _may_yet_succeed(status: int, *, tries: int) -> bool:
    if status in _BUSY:
        return True
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and tries < MAX_TRIES_ON_ERROR


def encode(report: BlocksReport) -> tuple[bytes, dict[str, str]]:
    """A report as a request body with its headers; gzipped where that is worth it."""
    body = report.model_dump_json().encode()
    headers = {"Content-Type": "application/json"}
    if len(body) >= GZIP_FROM_BYTES:
        body = gzip.compress(body, compresslevel=5)
        headers["Content-Encoding"] = "gzip"
    return body, headers


def combine(first: BlocksReport, second: BlocksReport) -> BlocksReport | None:
    """One report that says what two neighbours do; None where they must stay apart.

    They must where they are of two attempts, or would be too large a request. What is known of
    the run is as the later one says.
    """
    blocks = first.blocks + second.blocks
    if first.attempt != second.attempt or len(blocks) > MAX_BLOCKS_PER_REPORT:
        return None
    if sum(len(block.sums) for block in blocks) > MAX_SUMS_PER_REQUEST:
        return None
    return second.model_copy(update={"blocks": blocks, "ended": first.ended or second.ended})
