"""`noisescale-server stats`: what the database holds."""

import time
from typing import Annotated

import typer

from noisescale_server.commands.on_database import on_database
from noisescale_server.inventory import Inventory, take_inventory

EXAMPLES = "Examples:\n\n  noisescale-server stats\n\n  noisescale-server stats --json"


def stats(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print how many runs and blocks there are, how old, and how large the database is."""
    found = on_database(lambda database, settings: take_inventory(database, grace_s=settings.grace_s))
    if as_json:
        typer.echo(found.model_dump_json())
        return
    for name, value in _lines(found):
        typer.echo(f"{name:16}{value}")


def _lines(found: Inventory) -> list[tuple[str, str]]:
    return [
        ("runs", f"{found.runs:,}: {found.running:,} running, {found.stale:,} stale, {found.ended:,} ended"),
        ("steps", f"{found.steps:,}, {found.measured_steps:,} of them measured"),
        ("blocks", f"{found.blocks:,}"),
        ("rows", f"{found.rows:,}: {found.merged_rows:,} merged, {found.repeated_rows:,} of repeated steps"),
        ("oldest report", _moment(found.oldest_report_at)),
        ("newest report", _moment(found.newest_report_at)),
        ("size", f"{found.size_bytes / 1e6:,.1f} MB"),
    ]


def _moment(at: float | None) -> str:
    return "none" if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
