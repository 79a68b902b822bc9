"""Many reports into the database in one transaction, each block exactly once.

A block that covers a step which its attempt has stored already is a duplicate, and is left out.
A later attempt supersedes the blocks of earlier ones that reach into the steps it repeats; those
are marked, and count nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import and_, bindparam, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from noisescale.blocks import Block
from noisescale.wire import BlocksAccepted, BlocksReport
from noisescale_server.admission import RunLimits, refused
from noisescale_server.errors import TooManyGroupsError, TooManyRunsError
from noisescale_server.schema import attempts, runs, segments
from noisescale_server.segments import decode, segment_rows

_LARGEST_TOTAL = 2**62
_ROWS_PER_QUERY = 500


@dataclass(frozen=True, slots=True)
class Submission:
    """One report as it came in, with the Unix time of its arrival, and the token it came with."""

    run: str
    report: BlocksReport
    received_at: float
    token: str | None = None


Absorbed = BlocksAccepted | TooManyRunsError | TooManyGroupsError
"""The answer to a sender, or the error that it is answered with because its report was refused."""


@dataclass(slots=True)
class _Attempt:
    first_step: int | None
    last_step: int | None
    dropped_blocks: int
    changed: bool = False


@dataclass(slots=True)
class _Run:
    row: dict[str, Any]
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)
    supersede: list[tuple[int, int]] = field(default_factory=list)


async def absorb(
    connection: AsyncConnection, submissions: Sequence[Submission], *, limits: RunLimits
) -> list[Absorbed]:
    """Apply submissions in their order; the caller commits.

    Args:
        connection: In a transaction that writes.
        limits: What the database may hold.
    """
    found, too_many = await _load(connection, submissions, limits)
    results: list[Absorbed] = []
    for submission in submissions:
        if submission.run in too_many:
            results.append(too_many[submission.run])
        elif _too_many_groups(found[submission.run], submission.report, limits.max_groups):
            results.append(TooManyGroupsError(most=limits.max_groups))
        else:
            results.append(await _apply(connection, found[submission.run], submission))
    await _write(connection, list(found.values()))
    return results


async def _load(
    connection: AsyncConnection, submissions: Sequence[Submission], limits: RunLimits
) -> tuple[dict[str, _Run], dict[str, TooManyRunsError]]:
    """The runs that are reported on, made where they are new, locked against other writers.

    And why those that are one too many were not made.
    """
    names = sorted({submission.run for submission in submissions})
    found = await _select_runs(connection, names)
    first = {submission.run: submission for submission in reversed(submissions)}
    new = [name for name in names if name not in found]
    too_many = await refused(connection, [(name, first[name].token) for name in new], limits) if new else {}
    new = [name for name in new if name not in too_many]
    if new:
        await connection.execute(
            _upsert(connection, runs).on_conflict_do_nothing(index_elements=["name"]),
            [_new_run(first[name]) for name in new],
        )
        found |= await _select_runs(connection, new)
    by_id = {run.row["id"]: run for run in found.values()}
    for ids in _chunks(list(by_id)):
        for row in await connection.execute(select(attempts).where(attempts.c.run_id.in_(ids))):
            by_id[row.run_id].attempts[row.attempt] = _Attempt(
                row.first_step, row.last_step, row.dropped_blocks
            )
    return found, too_many


async def _select_runs(connection: AsyncConnection, names: Sequence[str]) -> dict[str, _Run]:
    found: dict[str, _Run] = {}
    for chunk in _chunks(names):
        # In one order everywhere, so that two writers on PostgreSQL never wait for each other's rows.
        query = select(runs).where(runs.c.name.in_(chunk)).order_by(runs.c.name).with_for_update()
        for row in (await connection.execute(query)).mappings():
            found[row["name"]] = _Run(row=dict(row))
    return found


def _new_run(submission: Submission) -> dict[str, Any]:
    version = int(submission.received_at * 1000)
    return {
        "name": submission.run,
        "info": submission.report.run.model_dump_json(exclude_none=True),
        "created_at": submission.received_at,
        "last_report_at": submission.received_at,
        "ended": False,
        "attempt": submission.report.attempt,
        "version": version,
        "rewritten": version,
        "last_step": None,
        "steps": 0,
        "measured_steps": 0,
        "skipped_steps": 0,
        "examples": 0,
        "pending_blocks": 0,
        "token": submission.token,
        "groups": "",
    }


def _too_many_groups(run: _Run, report: BlocksReport, most: int) -> bool:
    """Whether a report would give the run more layer groups than it may have; remembers them if not."""
    known: str = run.row["groups"]
    reported = {f"{sums.group}/{sums.geometry}" for block in report.blocks for sums in block.sums}
    new = reported.difference(known.split(","))
    if not new:
        return False
    groups = [*filter(None, known.split(",")), *sorted(new)]
    if len(groups) > most:
        return True
    run.row["groups"] = ",".join(groups)
    return False


async def _apply(connection: AsyncConnection, run: _Run, submission: Submission) -> BlocksAccepted:
    report, row = submission.report, run.row
    attempt = run.attempts.setdefault(report.attempt, _Attempt(None, None, 0, changed=True))
    fresh = await _fresh(connection, run, attempt, report)
    row["version"] += 1
    if fresh:
        was_last_step = row["last_step"]
        _add(run, report.attempt, fresh)
        row["pending_blocks"] += len(fresh)
        first, last = fresh[0].first_step, fresh[-1].last_step
        if was_last_step is not None and first <= was_last_step:
            row["rewritten"] = row["version"]  # not behind all that was known
        if attempt.first_step is None or first < attempt.first_step:
            attempt.first_step = first
            if any(
                number < report.attempt and other.last_step is not None and other.last_step >= first
                for number, other in run.attempts.items()
            ):
                run.supersede.append((report.attempt, first))
                row["rewritten"] = row["version"]
        attempt.last_step = last if attempt.last_step is None else max(attempt.last_step, last)
        attempt.changed = True
    if report.dropped_blocks > attempt.dropped_blocks:
        attempt.dropped_blocks = report.dropped_blocks
        attempt.changed = True
    if report.attempt >= row["attempt"]:
        row["attempt"] = report.attempt
        row["ended"] = report.ended
        row["info"] = report.run.model_dump_json(exclude_none=True)
    row["last_report_at"] = max(row["last_report_at"], submission.received_at)
    return BlocksAccepted(
        accepted=len(fresh),
        duplicates=len(report.blocks) - len(fresh),
        last_step=row["last_step"] if row["last_step"] is not None else attempt.last_step,
    )


async def _fresh(
    connection: AsyncConnection, run: _Run, attempt: _Attempt, report: BlocksReport
) -> Sequence[Block]:
    """The report's blocks that cover no step which this attempt has stored; in step order."""
    known_until = attempt.last_step
    if known_until is None or not report.blocks or report.blocks[0].first_step > known_until:
        return report.blocks
    first, last = report.blocks[0].first_step, report.blocks[-1].last_step
    stored = [
        (row["first_step"], row["last_step"]) for row in run.pending if row["attempt"] == report.attempt
    ]
    query = select(segments.c.first_step, segments.c.last_step).where(
        segments.c.run_id == run.row["id"],
        segments.c.attempt == report.attempt,
        segments.c.first_step <= last,
        segments.c.last_step >= first,
    )
    stored += [(row.first_step, row.last_step) for row in await connection.execute(query)]
    return [
        block
        for block in report.blocks
        if not any(low <= block.last_step and block.first_step <= high for low, high in stored)
    ]


def _add(run: _Run, attempt: int, fresh: Sequence[Block]) -> None:
    """Keep blocks for storing, and count those that no later attempt has repeated."""
    repeated_from = min(
        (
            other.first_step
            for number, other in run.attempts.items()
            if number > attempt and other.first_step is not None
        ),
        default=None,
    )
    counting = len(fresh)
    if repeated_from is not None:
        counting = sum(block.last_step < repeated_from for block in fresh)
        run.pending += segment_rows(run.row["id"], attempt, fresh[counting:], superseded=True)
    rows = segment_rows(run.row["id"], attempt, fresh[:counting], superseded=False)
    run.pending += rows
    for segment in rows:
        _count(run.row, segment)


def _count(row: dict[str, Any], segment: dict[str, Any]) -> None:
    row["last_step"] = max(segment["last_step"], -1 if row["last_step"] is None else row["last_step"])
    row["steps"] = min(_LARGEST_TOTAL, row["steps"] + segment["last_step"] - segment["first_step"] + 1)
    for name in ("measured_steps", "skipped_steps", "examples"):
        row[name] = min(_LARGEST_TOTAL, row[name] + segment[name])


async def _write(connection: AsyncConnection, changed: Sequence[_Run]) -> None:
    pending = [row for run in changed for row in run.pending]
    if pending:
        await connection.execute(insert(segments), pending)
    rows = [
        {
            "run_id": run.row["id"],
            "attempt": number,
            "first_step": attempt.first_step,
            "last_step": attempt.last_step,
            "dropped_blocks": attempt.dropped_blocks,
        }
        for run in changed
        for number, attempt in run.attempts.items()
        if attempt.changed
    ]
    if rows:
        statement = _upsert(connection, attempts)
        await connection.execute(
            statement.on_conflict_do_update(
                index_elements=["run_id", "attempt"],
                set_={
                    name: statement.excluded[name] for name in ("first_step", "last_step", "dropped_blocks")
                },
            ),
            rows,
        )
    for run in changed:
        if run.supersede:
            await _supersede(connection, run)
    if changed:
        columns = [c.name for c in runs.c if c.name not in ("id", "name", "created_at")]
        await connection.execute(
            update(runs)
            .where(runs.c.id == bindparam("b_id"))
            .values({name: bindparam(f"b_{name}") for name in columns}),
            [{f"b_{name}": run.row[name] for name in ("id", *columns)} for run in changed],
        )


async def _supersede(connection: AsyncConnection, run: _Run) -> None:
    """Mark what later attempts repeat, and count the run anew."""
    of_run = segments.c.run_id == run.row["id"]
    for attempt, first in run.supersede:
        earlier = and_(of_run, segments.c.attempt < attempt, segments.c.superseded.is_(False))
        across = and_(earlier, segments.c.first_step < first, segments.c.last_step >= first)
        for segment in (await connection.execute(select(segments).where(across))).all():
            await _part(connection, segment, first)
        await connection.execute(
            update(segments).where(earlier, segments.c.last_step >= first).values(superseded=True)
        )
    counts = and_(of_run, segments.c.superseded.is_(False))
    totals = (
        func.coalesce(func.sum(segments.c.last_step - segments.c.first_step + 1), 0),
        *(
            func.coalesce(func.sum(segments.c[name]), 0)
            for name in ("measured_steps", "skipped_steps", "examples")
        ),
    )
    counted = (await connection.execute(select(func.max(segments.c.last_step), *totals).where(counts))).one()
    names = ("last_step", "steps", "measured_steps", "skipped_steps", "examples")
    for name, value in zip(names, counted, strict=True):
        run.row[name] = None if value is None else min(_LARGEST_TOTAL, int(value))


async def _part(connection: AsyncConnection, segment: Any, first: int) -> None:
    """Part a segment before the block that reaches step `first`; what comes before stays as it is."""
    blocks = decode(segment.body)
    kept = sum(block.last_step < first for block in blocks)
    if kept == 0:
        return
    (before,) = segment_rows(
        segment.run_id, segment.attempt, blocks[:kept], superseded=False, level=segment.level
    )
    after = segment_rows(segment.run_id, segment.attempt, blocks[kept:], superseded=True)
    key = ("run_id", "first_step", "attempt")
    await connection.execute(
        update(segments)
        .where(*(segments.c[name] == before[name] for name in key))
        .values({name: value for name, value in before.items() if name not in key})
    )
    await connection.execute(insert(segments), after)


def _upsert(connection: AsyncConnection, table: Any) -> Any:
    """An INSERT that knows ON CONFLICT, in this database's dialect."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


def _chunks(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[i : i + _ROWS_PER_QUERY] for i in range(0, len(items), _ROWS_PER_QUERY)]
