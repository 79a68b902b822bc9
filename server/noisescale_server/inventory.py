"""What the database holds, counted."""

import time

from pydantic import BaseModel
from sqlalchemy import ColumnExpressionArgument, case, func, select, text
from sqlalchemy.sql.functions import Function

from noisescale_server.database import Database
from noisescale_server.schema import runs, segments


class Inventory(BaseModel):
    """Counts of one moment.

    Attributes:
        running, stale, ended: Runs by state.
        rows: Of blocks, those of repeated steps included.
        merged_rows: Rows whose blocks have been merged with others.
        repeated_rows: Rows of steps that a later attempt took again; they count nowhere.
        steps, measured_steps: Over all runs.
        oldest_report_at, newest_report_at: Unix times of runs' last reports; null without runs.
        size_bytes: Of the database, free room in it included.
    """

    runs: int
    running: int
    stale: int
    ended: int
    rows: int
    merged_rows: int
    repeated_rows: int
    blocks: int
    steps: int
    measured_steps: int
    oldest_report_at: float | None
    newest_report_at: float | None
    size_bytes: int


async def take_inventory(database: Database, *, grace_s: float) -> Inventory:
    """Count what there is.

    Args:
        grace_s: Seconds without a report after which a run is stale.
    """
    since = time.time() - grace_s
    live = runs.c.ended.is_(False) & (runs.c.last_report_at >= since)
    of_runs = select(
        func.count().label("runs"),
        _sum_of(live).label("running"),
        _sum_of(runs.c.ended).label("ended"),
        func.coalesce(func.sum(runs.c.steps), 0).label("steps"),
        func.coalesce(func.sum(runs.c.measured_steps), 0).label("measured_steps"),
        func.min(runs.c.last_report_at).label("oldest_report_at"),
        func.max(runs.c.last_report_at).label("newest_report_at"),
    )
    of_rows = select(
        func.count().label("rows"),
        _sum_of(segments.c.level > 0).label("merged_rows"),
        _sum_of(segments.c.superseded).label("repeated_rows"),
        func.coalesce(func.sum(case((segments.c.superseded, 0), else_=segments.c.blocks)), 0).label("blocks"),
    )
    size = text(
        "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        if database.is_sqlite
        else "SELECT pg_database_size(current_database())"
    )
    async with database.reading() as connection:
        found = dict((await connection.execute(of_runs)).one()._mapping)
        found |= dict((await connection.execute(of_rows)).one()._mapping)
        found["size_bytes"] = (await connection.execute(size)).scalar_one()
    return Inventory(**found, stale=found["runs"] - found["running"] - found["ended"])


def _sum_of(condition: ColumnExpressionArgument[bool]) -> Function[int]:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
