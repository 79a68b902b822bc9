"""Keeping the database small: old blocks are merged, and runs that nobody reported on for long are removed.

Both in transactions of a few milliseconds, so that reports never wait for long; any number of processes may
do it at once. What a transaction replaces is read before it, and compared in it: where another writer was
faster, nothing is done, and the next round sees what there is.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import ColumnElement, and_, case, delete, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from noisescale_server.database import Database
from noisescale_server.merging import ROW_BLOCKS, Row, Unit, merged, units
from noisescale_server.process_metrics import ProcessMetrics
from noisescale_server.schema import attempts, runs, segments
from noisescale_server.segments import decode, segment_rows

_log = structlog.get_logger(__name__)

PENDING_BLOCKS = 256
"""Blocks that come to a run before it is looked at again."""

DAY_S = 86_400.0

_ROUND_S = 15.0
_PURGE_ROUND_S = 600.0
_RUNS_PER_QUERY = 100
_PAUSE_S = 0.005
_MOST_PAUSES = 200
"""For which one bit of work waits, at most, until there is a moment in which no report does."""

_ROW = [
    segments.c[name] for name in ("first_step", "attempt", "last_step", "blocks", "measured_steps", "level")
]


@dataclass(frozen=True, slots=True)
class Merged:
    """What merging did to one run."""

    run: str
    blocks_before: int
    blocks_after: int


@dataclass(frozen=True, slots=True)
class Purged:
    """A run that was removed, with all that was reported on it."""

    run: str
    segments: int


class Retention:
    """Merges and purges, in the background or at once.

    Args:
        window_steps: Measured steps that an estimate looks back over.
        retention_days: Days without a report after which a run is removed; 0: never.
        is_busy: Whether there is work that should go before this.
    """

    def __init__(
        self,
        database: Database,
        *,
        window_steps: int,
        retention_days: float,
        metrics: ProcessMetrics | None = None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._database = database
        self._window_steps = window_steps
        self._retention_days = retention_days
        self._metrics = metrics
        self._is_busy = is_busy
        self._task: asyncio.Task[None] | None = None
        self._purge_at = time.monotonic()

    def start(self) -> None:
        """Go on in the background, round after round."""
        self._task = asyncio.create_task(self._run(), name="retention")

    async def close(self) -> None:
        """Stop; what is not done is done by the next process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def merge(self, *, run: str | None = None, at_least: int = PENDING_BLOCKS) -> AsyncIterator[Merged]:
        """Merge the old blocks of every run that has new ones.

        Args:
            run: Of this one alone.
            at_least: Only where so many blocks came since the last time.
        """
        after = 0
        while True:
            query = select(runs.c.id, runs.c.name, runs.c.pending_blocks).where(
                runs.c.id > after, runs.c.pending_blocks >= at_least
            )
            if run is not None:
                query = query.where(runs.c.name == run)
            async with self._database.reading() as connection:
                found = (await connection.execute(query.order_by(runs.c.id).limit(_RUNS_PER_QUERY))).all()
            for run_id, name, pending in found:
                before, after_merging = await self._merge_run(run_id)
                await self._looked_at(run_id, pending)
                yield Merged(name, before, after_merging)
                after = run_id
            if len(found) < _RUNS_PER_QUERY:
                return

    async def purge(self, *, days: float, run: str | None = None) -> AsyncIterator[Purged]:
        """Remove runs without a report for so many days, the oldest first; each in one transaction.

        Args:
            run: This one alone.
        """
        cutoff = time.time() - days * DAY_S
        for run_id, name in await self.outdated(days=days, run=run):
            await self._give_way()
            async with self._database.writing() as connection:
                # A report may have come in between: then the run stays.
                of_run = and_(runs.c.id == run_id, runs.c.name == name, runs.c.last_report_at <= cutoff)
                locked = await connection.execute(select(runs.c.id).where(of_run).with_for_update())
                if locked.one_or_none() is None:
                    continue
                removed = await connection.execute(delete(segments).where(segments.c.run_id == run_id))
                await connection.execute(delete(attempts).where(attempts.c.run_id == run_id))
                await connection.execute(delete(runs).where(runs.c.id == run_id))
            if self._metrics is not None:
                self._metrics.purged_runs.inc()
            yield Purged(name, removed.rowcount)

    async def outdated(self, *, days: float, run: str | None = None) -> list[tuple[int, str]]:
        """Id and name of the runs without a report for so many days, the oldest first."""
        query = select(runs.c.id, runs.c.name).where(runs.c.last_report_at <= time.time() - days * DAY_S)
        if run is not None:
            query = query.where(runs.c.name == run)
        async with self._database.reading() as connection:
            found = await connection.execute(query.order_by(runs.c.last_report_at, runs.c.id))
            return [(row.id, row.name) for row in found]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_ROUND_S)
            await self._round()

    async def _round(self) -> None:
        try:
            async with self._database.alone() as is_alone:
                if is_alone:  # otherwise another process is at it
                    await self._merge_all()
                    await self._purge_all()
        except (SQLAlchemyError, OSError) as error:
            self._count_failure()
            reason = getattr(error, "orig", None) or error
            _log.warning("retention goes on later", error=f"{type(reason).__name__}: {reason}"[:300])
        except Exception:  # noqa: BLE001  it has to live on, or the database grows without end
            self._count_failure()
            _log.exception("retention failed")

    def _count_failure(self) -> None:
        if self._metrics is not None:
            self._metrics.retention_failures.inc()

    async def _merge_all(self) -> None:
        async for done in self.merge():
            _log.debug("merged", run=done.run, before=done.blocks_before, after=done.blocks_after)

    async def _purge_all(self) -> None:
        if not self._retention_days or time.monotonic() < self._purge_at:
            return
        self._purge_at = time.monotonic() + _PURGE_ROUND_S
        count = 0
        async for done in self.purge(days=self._retention_days):
            count += 1
            _log.info("run purged", run=done.run, segments=done.segments)
        if count:
            _log.info("runs purged", runs=count, retention_days=self._retention_days)

    async def _merge_run(self, run_id: int) -> tuple[int, int]:
        """Merge what is due of one run; blocks that were looked at, and what became of them."""
        async with self._database.reading() as connection:
            rows = await _rows(connection, _counting(run_id))
        before = after = 0
        for unit in units(rows, window_steps=self._window_steps):
            await self._give_way()
            done = await self._merge_unit(run_id, unit)
            if done is not None:
                before += sum(row.blocks for row in unit.rows)
                after += done
        await self._join_superseded(run_id)
        if self._metrics is not None and before > after:
            self._metrics.merged_blocks.inc(before - after)
        return before, after

    async def _merge_unit(self, run_id: int, unit: Unit) -> int | None:
        """Merge some neighbours; how many blocks are left, None where they are others by now."""
        rows = unit.rows if unit.before is None else (unit.before, *unit.rows)
        query = select(segments.c.body).where(_between(run_id, rows)).order_by(segments.c.first_step)
        async with self._database.reading() as connection:
            bodies = (await connection.execute(query)).scalars().all()
        if len(bodies) != len(rows):
            return None
        # Beside the event loop, which has reports to answer.
        new = await asyncio.to_thread(_merged_rows, run_id, unit, bodies, window_steps=self._window_steps)
        async with self._database.writing() as connection:
            if not await _lock(connection, run_id):
                return None
            if await _rows(connection, _between(run_id, unit.rows)) != list(unit.rows):
                return None
            await connection.execute(delete(segments).where(_between(run_id, unit.rows)))
            await connection.execute(insert(segments), new)
            # A reader that is not up to date may know half of them: it has to read the tail anew.
            await connection.execute(update(runs).where(runs.c.id == run_id).values(rewritten=runs.c.version))
        return sum(int(row["blocks"]) for row in new)

    async def _join_superseded(self, run_id: int) -> None:
        """Of blocks that a later attempt repeated, keep which steps they were: they may be sent again."""
        of_run = and_(segments.c.run_id == run_id, segments.c.superseded.is_(True))
        async with self._database.reading() as connection:
            count = await connection.execute(select(func.count()).select_from(segments).where(of_run))
            if count.scalar_one() < ROW_BLOCKS:
                return
        await self._give_way()
        async with self._database.writing() as connection:
            if not await _lock(connection, run_id):
                return
            query = select(*_ROW).where(of_run).order_by(segments.c.attempt, segments.c.first_step)
            ranges: list[dict[str, Any]] = []
            for row in await connection.execute(query.limit(2000)):
                last = ranges[-1] if ranges else None
                if (
                    last is not None
                    and last["attempt"] == row.attempt
                    and last["last_step"] + 1 == row.first_step
                ):
                    last["last_step"] = row.last_step
                else:
                    ranges.append(_superseded_range(run_id, row))
            for joined in ranges:
                await connection.execute(
                    delete(segments).where(
                        of_run,
                        segments.c.attempt == joined["attempt"],
                        segments.c.first_step.between(joined["first_step"], joined["last_step"]),
                    )
                )
            await connection.execute(insert(segments), ranges)

    async def _looked_at(self, run_id: int, pending: int) -> None:
        rest = runs.c.pending_blocks - pending
        async with self._database.writing() as connection:
            await connection.execute(
                update(runs).where(runs.c.id == run_id).values(pending_blocks=case((rest > 0, rest), else_=0))
            )

    async def _give_way(self) -> None:
        """Let reports go first, within reason."""
        await asyncio.sleep(0)
        for _ in range(_MOST_PAUSES):
            if not self._is_busy():
                return
            await asyncio.sleep(_PAUSE_S)


def _merged_rows(
    run_id: int, unit: Unit, bodies: Sequence[str], *, window_steps: int
) -> list[dict[str, Any]]:
    """What a unit becomes.

    Args:
        bodies: Of its segments, and first of the one before it if there is one.
    """
    known = decode(bodies[0])[-1] if unit.before is not None else None
    own = bodies if unit.before is None else bodies[1:]
    blocks = [block for body in own for block in decode(body)]
    fewer = merged(blocks, before=known, level=unit.level, window_steps=window_steps)
    return [
        row
        for start in range(0, len(fewer), ROW_BLOCKS)
        for row in segment_rows(
            run_id,
            unit.rows[0].attempt,
            fewer[start : start + ROW_BLOCKS],
            superseded=False,
            level=unit.level,
        )
    ]


async def _rows(connection: AsyncConnection, wanted: ColumnElement[bool]) -> list[Row]:
    """Segments without their bodies, in step order."""
    found = await connection.execute(select(*_ROW).where(wanted).order_by(segments.c.first_step))
    return [Row(*row) for row in found.all()]


async def _lock(connection: AsyncConnection, run_id: int) -> bool:
    """Keep other writers off a run; False where it is gone."""
    query = select(runs.c.id).where(runs.c.id == run_id).with_for_update()
    return (await connection.execute(query)).one_or_none() is not None


def _counting(run_id: int) -> ColumnElement[bool]:
    """A run's segments that no later attempt has superseded."""
    return and_(segments.c.run_id == run_id, segments.c.superseded.is_(False))


def _between(run_id: int, rows: Sequence[Row]) -> ColumnElement[bool]:
    """A run's segments that count from the first of these to the last."""
    return and_(_counting(run_id), segments.c.first_step.between(rows[0].first_step, rows[-1].first_step))


def _superseded_range(run_id: int, row: Any) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "first_step": row.first_step,
        "attempt": row.attempt,
        "last_step": row.last_step,
        "blocks": 0,
        "measured_steps": 0,
        "skipped_steps": 0,
        "examples": 0,
        "superseded": True,
        "body": "[]",
        "level": 0,
    }
