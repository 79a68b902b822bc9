"""Whether a run that is new may come in: how many there may be, in all and by one token."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from noisescale_server.errors import TooManyRunsError
from noisescale_server.schema import runs


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How much the database may hold.

    Attributes:
        max_runs: Runs in all.
        max_runs_per_token: Runs that were first reported with one token.
        max_groups: Layer groups times geometries of one run.
    """

    max_runs: int
    max_runs_per_token: int = 2**31
    max_groups: int = 2**31


async def refused(
    connection: AsyncConnection, new: Sequence[tuple[str, str | None]], limits: RunLimits
) -> dict[str, TooManyRunsError]:
    """Which of some new runs are one too many, and why.

    Args:
        connection: In a transaction that writes.
        new: Name of each new run, and the token that reports it; the first ones are let in first.
        limits: What may be held.
    """
    room = limits.max_runs - (await connection.execute(select(func.count()).select_from(runs))).scalar_one()
    held: Counter[str] = Counter()
    tokens = {token for _, token in new if token is not None}
    if tokens:
        counts = (
            select(runs.c.token, func.count().label("held"))
            .where(runs.c.token.in_(tokens))
            .group_by(runs.c.token)
        )
        held.update({row.token: row.held for row in await connection.execute(counts)})
    found: dict[str, TooManyRunsError] = {}
    for name, token in new:
        if room <= 0:
            found[name] = TooManyRunsError(most=limits.max_runs)
        elif token is not None and held[token] >= limits.max_runs_per_token:
            found[name] = TooManyRunsError(most=limits.max_runs_per_token, of_token=True)
        else:
            room -= 1
            if token is not None:
                held[token] += 1
    return found
