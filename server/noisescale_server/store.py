"""What is stored, read: runs, and the blocks that no later attempt has superseded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from noisescale.blocks import Block
from noisescale.wire import RunInfo
from noisescale_server.absorb import Absorbed, Submission, absorb
from noisescale_server.admission import RunLimits
from noisescale_server.database import Database
from noisescale_server.errors import UnknownRunError
from noisescale_server.schema import attempts, blocks, runs

_CHUNK_BLOCKS = 128
_MOST_TAIL_BLOCKS = 1024
"""Blocks that a tail holds at most, should they be of very few steps each."""

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
            if name.startswith(self._prefix):
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

    async def tail(self, run_id: int) -> tuple[int, list[Block]]:
        """The run's version, and its last blocks, in step order: enough for one window, and no more."""
        async with self._database.reading() as connection:
            version = (
                await connection.execute(select(runs.c.version).where(runs.c.id == run_id))
            ).scalar_one()
            return version, await self._tail(connection, run_id)

    async def _tail(self, connection: AsyncConnection, run_id: int) -> list[Block]:
        tail: list[Block] = []
        measured = 0
        while len(tail) < _MOST_TAIL_BLOCKS:
            query = _effective(run_id)
            if tail:
                query = query.where(blocks.c.first_step < tail[-1].first_step)
            query = query.order_by(blocks.c.first_step.desc()).limit(_CHUNK_BLOCKS)
            chunk = [Block.model_validate_json(body) for body in (await connection.execute(query)).scalars()]
            tail += chunk
            measured += sum(block.measured_steps for block in chunk)
            if len(chunk) < _CHUNK_BLOCKS or measured >= self._window_steps:
                break
        tail.reverse()
        return tail

    async def blocks(
        self, run_id: int, *, from_step: int | None = None, to_step: int | None = None
    ) -> list[Block]:
        """The run's blocks in step order, those that cover any of the given steps."""
        query = _effective(run_id).order_by(blocks.c.first_step)
        if from_step is not None:
            query = query.where(blocks.c.last_step >= from_step)
        if to_step is not None:
            query = query.where(blocks.c.first_step <= to_step)
        async with self._database.reading() as connection:
            return [Block.model_validate_json(body) for body in (await connection.execute(query)).scalars()]

    async def count_blocks(self, run_id: int) -> int:
        """Rows of one run's blocks, superseded ones included."""
        query = select(func.count()).select_from(blocks).where(blocks.c.run_id == run_id)
        async with self._database.reading() as connection:
            return (await connection.execute(query)).scalar_one()

    async def check(self) -> None:
        """Raise what the driver raises where the database does not answer."""
        await self._database.check()


def _effective(run_id: int) -> Any:
    return select(blocks.c.body).where(blocks.c.run_id == run_id, blocks.c.superseded.is_(False))


def _run(row: Row[Any]) -> StoredRun:
    values = dict(row._mapping)
    values["info"] = RunInfo.model_validate_json(values["info"])
    return StoredRun(**values)
