"""What is stored, read: runs, and the blocks that no later attempt has superseded."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Row, and_, column, func, select, values
from sqlalchemy.ext.asyncio import AsyncConnection

from noisescale.blocks import Block
from noisescale.estimate import window
from noisescale.wire import RunInfo
from noisescale_server.absorb import Absorbed, Submission, absorb
from noisescale_server.admission import RunLimits
from noisescale_server.database import Database
from noisescale_server.errors import UnknownRunError
from noisescale_server.schema import attempts, runs, segments
from noisescale_server.segments import decode

_TAIL_SEGMENTS = (16, 1024)
"""Segments that are read for a tail at first, and where those do not hold enough steps."""

_MOST_TAIL_BLOCKS = 1024
"""Blocks that a tail holds at most, should they be of very few steps each."""

_NAMEABLE = re.compile(r"[A-Za-z0-9._-]+")
"""Names of other characters, one of which PostgreSQL does not take, are asked for in vain."""

_NAMES_COMPARED = 5000
"""Known names that a wrong one is compared with."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One row of the table of runs."""

    id: int
    name: str
    info: RunInfo
    created_at: float
    last_report_at: float
    ended: bool
    attempt: int
    version: int
    last_step: int | None
    steps: int
    measured_steps: int
    skipped_steps: int
    examples: int
    token: str | None
    groups: str
    rewritten: int
    pending_blocks: int


@dataclass(frozen=True, slots=True)
class Known:
    """How far a reader knows a run.

    Attributes:
        version: The run's, at which it read.
        last_step: Of the last block that it has.
    """

    version: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Change:
    """A run, and what a reader does not know of it.

    Attributes:
        added: Bodies of the segments that follow what it knows; or, where `whole`, those of its tail.
        whole: What it knows of the run is no more, or it knew nothing.
    """

    run: StoredRun
    added: list[str]
    whole: bool


class Store:
    """Reads and writes, over one database.

    Args:
        limits: What it may hold.
        window_steps: Measured steps that a tail has to hold.
        prefix: Only runs whose names start with this are seen.
    """

    def __init__(self, database: Database, *, limits: RunLimits, window_steps: int, prefix: str = "") -> None:
        self._database = database
        self._limits = limits
        self._window_steps = window_steps
        self._prefix = prefix

    def limited_to(self, prefix: str) -> "Store":
        """The same store, in which there are only the runs whose names start with `prefix`."""
        return Store(self._database, limits=self._limits, window_steps=self._window_steps, prefix=prefix)

    async def absorb(self, submissions: Sequence[Submission]) -> list[Absorbed]:
        """Store submissions, all in one commit or none."""
        async with self._database.writing() as connection:
            return await absorb(connection, submissions, limits=self._limits)

    async def run(self, name: str) -> StoredRun:
        """One run.

        Raises:
            UnknownRunError: There is none of that name.
        """
        async with self._database.reading() as connection:
            if name.startswith(self._prefix) and _NAMEABLE.fullmatch(name):
                row = (await connection.execute(select(runs).where(runs.c.name == name))).one_or_none()
                if row is not None:
                    return _run(row)
            names = select(runs.c.name).where(*self._seen())
            names = names.order_by(runs.c.last_report_at.desc()).limit(_NAMES_COMPARED)
            known = list((await connection.execute(names)).scalars())
        raise UnknownRunError(name, known=known)

    async def runs(
        self,
        *,
        reported_since: float | None = None,
        name_contains: str | None = None,
        limit: int | None = None,
    ) -> list[StoredRun]:
        """Runs, the one that reported last first.

        Args:
            reported_since: Only those with a report since this Unix time.
            name_contains: Only those with this in their name.
            limit: At most so many.
        """
        query = select(runs).where(*self._seen()).order_by(runs.c.last_report_at.desc(), runs.c.id)
        if reported_since is not None:
            query = query.where(runs.c.last_report_at >= reported_since)
        if name_contains:
            if not _NAMEABLE.fullmatch(name_contains):
                return []
            query = query.where(runs.c.name.contains(name_contains, autoescape=True))
        if limit is not None:
            query = query.limit(limit)
        async with self._database.reading() as connection:
            return [_run(row) for row in await connection.execute(query)]

    def _seen(self) -> list[ColumnElement[bool]]:
        # Not LIKE: SQLite's does not tell team-a from TEAM-A.
        return [func.substr(runs.c.name, 1, len(self._prefix)) == self._prefix] if self._prefix else []

    async def attempts(self, run_id: int) -> list[tuple[int, int]]:
        """Each attempt's number and the blocks it lost before sending them; oldest first."""
        query = select(attempts.c.attempt, attempts.c.dropped_blocks).where(attempts.c.run_id == run_id)
        async with self._database.reading() as connection:
            found = await connection.execute(query.order_by(attempts.c.attempt))
            return [(row.attempt, row.dropped_blocks) for row in found]

    async def restarts(self, run_id: int) -> list[tuple[int, int]]:
        """Of each attempt after the first that has blocks: which one it is, and its first step."""
        query = select(attempts.c.first_step).where(attempts.c.run_id == run_id)
        async with self._database.reading() as connection:
            found = (await connection.execute(query.order_by(attempts.c.attempt))).scalars().all()
        return [(place, step) for place, step in enumerate(found, start=1) if place > 1 and step is not None]

    async def live(self, *, reported_since: float) -> list[tuple[int, int]]:
        """Id and version of every run with a report since this Unix time, in the order of their names."""
        query = select(runs.c.id, runs.c.version).where(
            runs.c.last_report_at >= reported_since, *self._seen()
        )
        async with self._database.reading() as connection:
            found = await connection.execute(query.order_by(runs.c.name))
            return [(row[0], row[1]) for row in found.all()]

    async def changes(self, known: Mapping[int, Known | None]) -> list[Change]:
        """Some runs as they are now, all at one moment, with what a reader does not know of them.

        Args:
            known: How far the reader knows each run that it asks for, by id.
        """
        async with self._database.reading() as connection:
            found = await connection.execute(select(runs).where(runs.c.id.in_(known)))
            changed = {row.id: _run(row) for row in found}
            ahead: dict[int, int] = {}
            for run_id, run in changed.items():
                before = known[run_id]
                if before is not None and run.rewritten <= before.version:
                    ahead[run_id] = before.last_step
            whole = [run_id for run_id in changed if run_id not in ahead]
            bodies = await self._ahead(connection, ahead) | await self._tails(connection, whole)
        return [
            Change(run, bodies.get(run_id, []), whole=run_id not in ahead) for run_id, run in changed.items()
        ]

    async def _ahead(self, connection: AsyncConnection, after: Mapping[int, int]) -> dict[int, list[str]]:
        """Bodies of the segments that lie behind these steps of these runs."""
        if not after:
            return {}
        given = values(column("run", BigInteger), column("step", BigInteger)).data(list(after.items())).cte()
        query = (
            select(segments.c.run_id, segments.c.body)
            .join(given, and_(segments.c.run_id == given.c.run, segments.c.first_step > given.c.step))
            .where(segments.c.superseded.is_(False))
            .order_by(segments.c.run_id, segments.c.first_step)
        )
        found: dict[int, list[str]] = {}
        for run_id, body in await connection.execute(query):
            found.setdefault(run_id, []).append(body)
        return found

    async def _tails(self, connection: AsyncConnection, run_ids: Sequence[int]) -> dict[int, list[str]]:
        """Bodies of these runs' last segments: enough for one window."""
        found: dict[int, list[str]] = {}
        wanted = list(run_ids)
        for most in _TAIL_SEGMENTS:
            if not wanted:
                break
            of_run = segments.alias()
            start = (
                select(of_run.c.first_step)
                .where(of_run.c.run_id == runs.c.id, of_run.c.superseded.is_(False))
                .order_by(of_run.c.first_step.desc())
                .offset(most - 1)
                .limit(1)
                .scalar_subquery()
            )
            query = (
                select(segments.c.run_id, segments.c.measured_steps, segments.c.body)
                .join(runs, runs.c.id == segments.c.run_id)
                .where(runs.c.id.in_(wanted), segments.c.superseded.is_(False))
                .where(segments.c.first_step >= func.coalesce(start, 0))
                .order_by(segments.c.run_id, segments.c.first_step)
            )
            rows: dict[int, list[Any]] = {}
            for row in await connection.execute(query):
                rows.setdefault(row.run_id, []).append(row)
            found |= {run_id: [row.body for row in of_one] for run_id, of_one in rows.items()}
            wanted = [
                run_id
                for run_id, of_one in rows.items()
                if len(of_one) == most and sum(row.measured_steps for row in of_one) < self._window_steps
            ]
        return found

    async def blocks(
        self, run_id: int, *, from_step: int | None = None, to_step: int | None = None
    ) -> list[Block]:
        """The run's blocks in step order, those that cover any of the given steps."""
        query = select(segments.c.body).where(segments.c.run_id == run_id, segments.c.superseded.is_(False))
        if from_step is not None:
            query = query.where(segments.c.last_step >= from_step)
        if to_step is not None:
            query = query.where(segments.c.first_step <= to_step)
        async with self._database.reading() as connection:
            bodies = (await connection.execute(query.order_by(segments.c.first_step))).scalars().all()
        return [
            block
            for body in bodies
            for block in decode(body)
            if (from_step is None or block.last_step >= from_step)
            and (to_step is None or block.first_step <= to_step)
        ]

    async def count_segments(self, run_id: int) -> int:
        """Rows of one run's segments, superseded ones included."""
        query = select(func.count()).select_from(segments).where(segments.c.run_id == run_id)
        async with self._database.reading() as connection:
            return (await connection.execute(query)).scalar_one()

    async def check(self, *, writes: bool = False) -> None:
        """Raise what the driver raises where the database does not answer, or does not store."""
        if writes:
            await self._database.check_writing()
        else:
            await self._database.check()


def tail_of(blocks: Sequence[Block], *, window_steps: int) -> Sequence[Block]:
    """The last blocks, as many as one window needs: the same ones from however many are given."""
    return window(blocks, window_steps=window_steps)[-_MOST_TAIL_BLOCKS:]


def _run(row: Row[Any]) -> StoredRun:
    values = dict(row._mapping)
    values["info"] = RunInfo.model_validate_json(values["info"])
    return StoredRun(**values)
