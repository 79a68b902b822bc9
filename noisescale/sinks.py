"""Where measured blocks go: anything with `report`, `flush` and `close`.

BackgroundSink turns any slow or failing delivery into a sink that training does not notice: a
bounded queue, drained by a daemon thread, that drops the oldest when it is full and counts what
it dropped.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from noisescale.errors import InvalidInputError
from noisescale.wire import BlocksReport

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes reports on the training thread. Never blocks there and never raises."""

    def report(self, report: BlocksReport) -> None:
        """Take one report in; delivered later, on another thread."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was taken in is delivered; whether it was, in time."""

    def close(self, timeout_s: float) -> bool:
        """Flush and stop; later reports are dropped and counted."""


class BackgroundSink:
    """A sink that hands each report, in order, to `deliver` on a thread of its own.

    The thread starts with the first report and is a daemon: what is still waiting when the
    interpreter exits is lost, so close() first. After a fork the child starts afresh, with an
    empty queue; what was waiting is the parent's to deliver. A pickled or copied sink is a fresh
    one too, and can be pickled where `deliver` can.

    Args:
        deliver: Takes one report; may block and may raise. What it raises is logged once, and
            the report's blocks count as dropped.
        name: Of the destination, for the log: "http://localhost:8000".
        capacity: Reports that may wait; one more drops the oldest.
        combine: Makes one report of two neighbours that both wait, or answers None to keep them
            apart.

    Raises:
        InvalidInputError: The capacity is not positive.
    """

    def __init__(
        self,
        deliver: Callable[[BlocksReport], None],
        *,
        name: str,
        capacity: int = 256,
        combine: Callable[[BlocksReport, BlocksReport], BlocksReport | None] | None = None,
    ) -> None:
        if capacity < 1:
            raise InvalidInputError(f"capacity must be at least 1 report, got {capacity}", field="capacity")
        self.name = name
        self.capacity = capacity
        self._deliver = deliver
        self._combine = combine
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[BlocksReport] = deque()
        self._thread: threading.Thread | None = None
        self._delivering = False
        self._closed = False
        self._give_up = False
        self._hurries = 0
        self._hurried = 0
        self._dropped_blocks = 0
        self._lost_reports = 0
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "capacity", "_deliver", "_combine")
        return {key: self.__dict__[key] for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_afresh()

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were taken in and will never be delivered."""
        return self._dropped_blocks

    def report(self, report: BlocksReport) -> None:
        """Take one report in. Never waits for a delivery and never raises."""
        self._after_fork()
        dropped = None
        with self._changed:
            if self._closed:
                self._count_lost(report)
                why = "it is closed"
            else:
                if len(self._queue) >= self.capacity:
                    dropped = self._queue.popleft()
                    self._count_lost(dropped)
                self._queue.append(report)
                why = self._ensure_thread()
                self._changed.notify_all()
        if dropped is not None:
            why = f"{self.capacity} reports are waiting already and the oldest had to go"
        if why:
            self._say("dropping", "noisescale is dropping measurements for %s: %s", self.name, why)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits; whether all that waited was delivered, in time."""
        self._after_fork()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            lost_before = self._lost_reports
            self._hurries += 1
            self._changed.notify_all()
            idle = self._changed.wait_for(self._idle, timeout=max(0.0, deadline - time.monotonic()))
            return idle and self._lost_reports == lost_before

    def close(self, timeout_s: float) -> bool:
        """Flush and stop. What is not delivered in time is dropped and counted, as is what comes later."""
        delivered = self.flush(timeout_s)
        left = 0
        with self._changed:
            self._closed = True
            self._give_up = True
            while self._queue:
                left += 1
                self._count_lost(self._queue.popleft())
            self._changed.notify_all()
        if left:
            self._say(
                "dropping",
                "noisescale is dropping measurements for %s: not delivered in the %g s it had to close",
                self.name,
                timeout_s,
            )
        return delivered

    def pause(self, seconds: float, *, may_hurry: bool = True) -> bool:
        """For `deliver`, between two tries: sleep, and answer whether to try again.

        After close() there is no further try. A flush ends the sleep early, or skips it where it
        came during the try before, so that one last try is made at once.

        Args:
            may_hurry: Whether a flush does so; not where the other side asked for the wait.
        """

        def awake() -> bool:
            return self._give_up or (may_hurry and self._hurries != self._hurried)

        with self._changed:
            self._changed.wait_for(awake, timeout=seconds)
            self._hurried = self._hurries
            return not self._give_up

    def _idle(self) -> bool:
        return not self._queue and not self._delivering

    def _count_lost(self, report: BlocksReport) -> None:
        self._lost_reports += 1
        self._dropped_blocks += len(report.blocks)

    def _say(self, topic: str, message: str, *arguments: object) -> None:
        """Log a warning, the first time for each topic."""
        if topic not in self._said:
            self._said.add(topic)
            _log.warning(message + " (said once; dropped blocks are counted)", *arguments)

    def _after_fork(self) -> None:
        # The parent's thread does not exist in the child, and the parent's lock may be held for ever.
        if self._pid != os.getpid():
            self._start_afresh()

    def _ensure_thread(self) -> str:
        """Start the thread where there is none; why it could not be, if so."""
        if self._thread is not None:
            return ""
        thread = threading.Thread(target=self._run, name=f"noisescale to {self.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            while self._queue:
                self._count_lost(self._queue.popleft())
            return f"its thread could not be started: {error}"
        self._thread = thread
        return ""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._give_up)
                if not self._queue:
                    return
                report = self._take()
                self._delivering = True
            failure = self._try_to_deliver(report)
            with self._changed:
                self._delivering = False
                if failure is not None:
                    self._count_lost(report)
                self._changed.notify_all()
            if failure is not None:
                self._say("failed", "noisescale could not deliver measurements to %s: %s", self.name, failure)

    def _take(self) -> BlocksReport:
        report = self._queue.popleft()
        while self._combine is not None and self._queue:
            both = self._combine(report, self._queue[0])
            if both is None:
                break
            self._queue.popleft()
            report = both
        if self._dropped_blocks:
            total = report.dropped_blocks + self._dropped_blocks
            report = report.model_copy(update={"dropped_blocks": total})
        return report

    def _try_to_deliver(self, report: BlocksReport) -> str | None:
        try:
            self._deliver(report)
        except Exception as error:  # noqa: BLE001  whatever a delivery raises, training goes on; it is logged
            return f"{type(error).__name__}: {error}"
        return None
