"""`noisescale-server prune`: merge and remove now, what the server would do in time."""

from typing import Annotated

import typer

from noisescale_server.commands.on_database import on_database
from noisescale_server.database import Database
from noisescale_server.errors import StartError
from noisescale_server.retention import Retention
from noisescale_server.settings import Settings

EXAMPLES = (
    "Examples:\n\n  noisescale-server prune --dry-run\n\n  noisescale-server prune --older-than 90\n\n"
    "  noisescale-server prune --run digits --older-than 0"
)


def prune(
    older_than: Annotated[
        float | None,
        typer.Option(
            help="Remove runs without a report for so many days; NOISESCALE_RETENTION_DAYS if left out."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print which runs would be removed, and change nothing.")
    ] = False,
) -> None:
    """Remove runs that nobody reported on for long, and merge the others' old blocks.

    The server may go on meanwhile: it does the same by itself, round after round.
    """
    if older_than is not None and not 0 <= older_than < 1e6:
        raise StartError(f"--older-than is a number of days, 0 or more, got {older_than!r}")

    async def work(database: Database, settings: Settings) -> None:
        days = settings.retention_days if older_than is None else older_than
        removes = older_than is not None or settings.retention_days > 0
        retention = Retention(
            database, window_steps=settings.window_steps, retention_days=settings.retention_days
        )
        if dry_run:
            outdated = await retention.outdated(days=days, run=run) if removes else []
            for _, name in outdated:
                typer.echo(name)
            typer.echo(f"would remove {_count(len(outdated), 'run')}")
            return
        removed = gone = 0
        if removes:
            async for purged in retention.purge(days=days, run=run):
                removed += 1
                typer.echo(f"{purged.run}: removed, {_count(purged.segments, 'row')}")
        async for merged in retention.merge(run=run, at_least=1):
            if merged.blocks_after < merged.blocks_before:
                gone += merged.blocks_before - merged.blocks_after
                typer.echo(f"{merged.run}: {merged.blocks_before} old blocks are {merged.blocks_after} now")
        typer.echo(f"removed {_count(removed, 'run')}, merged {_count(gone, 'block')} away")

    on_database(work)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
