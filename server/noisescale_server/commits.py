"""Group commit: reports that arrive together are stored in one transaction, and answered after it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from noisescale.wire import BlocksAccepted, BlocksReport
from noisescale_server.absorb import Submission
from noisescale_server.errors import QueueFullError, StoreUnavailableError
from noisescale_server.process_metrics import ProcessMetrics
from noisescale_server.store import Store

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    submission: Submission
    done: "asyncio.Future[BlocksAccepted]"


class Commits:
    """One writer for all requests of this process."""

    def __init__(
        self,
        store: Store,
        *,
        queue_size: int,
        commit_size: int,
        metrics: ProcessMetrics,
    ) -> None:
        self._store = store
        self._queue: asyncio.Queue[_Waiting | None] = asyncio.Queue(maxsize=queue_size)
        self._commit_size = commit_size
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._storing = False
        self._failing = False

    @property
    def is_failing(self) -> bool:
        """Whether the database refused the last transaction."""
        return self._failing

    @property
    def is_busy(self) -> bool:
        """Whether a report waits for its commit."""
        return self._storing or not self._queue.empty()

    def start(self) -> None:
        """Start the writer."""
        self._task = asyncio.create_task(self._run(), name="commits")

    async def submit(self, run: str, report: BlocksReport, *, token: str | None = None) -> BlocksAccepted:
        """Store one report; returns after the commit that holds it.

        Args:
            token: Whose it is, for the limits of one token.

        Raises:
            QueueFullError: Too many wait already.
            StoreUnavailableError: The database failed; nothing of this report is stored.
            TooManyRunsError: The run is new, and one too many.
            TooManyGroupsError: It would have too many layer groups.
        """
        if self._closed:
            raise StoreUnavailableError
        done: asyncio.Future[BlocksAccepted] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait(_Waiting(Submission(run, report, time.time(), token), done))
        except asyncio.QueueFull:
            raise QueueFullError(waiting=self._queue.qsize()) from None
        self._metrics.queue_depth.set(self._queue.qsize())
        return await done

    async def close(self) -> None:
        """Store what waits, then stop."""
        self._closed = True
        if self._task is not None:
            await self._queue.put(None)
            await self._task

    async def _run(self) -> None:
        stopping = False
        while not stopping:
            batch: list[_Waiting] = []
            item = await self._queue.get()
            while item is not None:
                batch.append(item)
                if len(batch) >= self._commit_size or self._queue.empty():
                    break
                item = self._queue.get_nowait()
            stopping = item is None
            self._metrics.queue_depth.set(self._queue.qsize())
            if batch:
                self._storing = True
                await self._store_batch(batch)
                self._storing = False

    async def _store_batch(self, batch: Sequence[_Waiting]) -> None:
        started = time.perf_counter()
        try:
            results = await self._store.absorb([waiting.submission for waiting in batch])
        except (DBAPIError, OSError) as error:
            # One report may be at fault, say a number that the database cannot hold: part them, so
            # that it fails alone.
            if len(batch) > 1 and not _is_outage(error):
                for waiting in batch:
                    await self._store_batch([waiting])
                return
            _log.error("commit failed", reports=len(batch), error=_words(error))
            self._fail(batch)
            return
        except Exception:  # noqa: BLE001  the writer has to live on, or no report is ever stored again
            _log.exception("commit failed", reports=len(batch))
            self._fail(batch)
            return
        self._failing = False
        self._metrics.commit_seconds.observe(time.perf_counter() - started)
        self._metrics.commit_reports.observe(len(batch))
        for waiting, result in zip(batch, results, strict=True):
            if waiting.done.done():
                continue  # the sender has gone; what it sent is stored all the same
            if isinstance(result, BlocksAccepted):
                self._metrics.blocks.labels("accepted").inc(result.accepted)
                self._metrics.blocks.labels("duplicate").inc(result.duplicates)
                waiting.done.set_result(result)
            else:
                waiting.done.set_exception(result)

    def _fail(self, batch: Sequence[_Waiting]) -> None:
        self._failing = True
        self._metrics.failed_commits.inc()
        for waiting in batch:
            if not waiting.done.done():
                waiting.done.set_exception(StoreUnavailableError())


def _is_outage(error: SQLAlchemyError | OSError) -> bool:
    """Whether the database as a whole is at fault, so that trying reports one by one is in vain."""
    if isinstance(error, OSError):
        return True
    return isinstance(error, DBAPIError) and (
        error.connection_invalidated or type(error).__name__ in ("OperationalError", "InterfaceError")
    )


def _words(error: BaseException) -> str:
    """What happened, without the statement and the values of it."""
    origin = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return f"{type(origin).__name__}: {origin}"
