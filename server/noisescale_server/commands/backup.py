"""`noisescale-server backup`: a copy of the SQLite database while the server goes on."""

import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy.engine import make_url

from noisescale_server.errors import StartError
from noisescale_server.settings import load_settings

EXAMPLES = "Example:\n\n  noisescale-server backup noisescale-backup.db"

_PAGES_PER_STEP = 256


def backup(
    destination: Annotated[Path, typer.Argument(help="The file to make; there must be none yet.")],
) -> None:
    """Copy the SQLite database to a file, as of one moment, while the server goes on; then check the copy.

    To restore it, stop the server, and let NOISESCALE_DATABASE_URL name the copy. Of PostgreSQL it says how.
    """
    url = make_url(load_settings().database_url)
    if not url.drivername.startswith("sqlite"):
        # pg_dump asks for the password, or finds it in ~/.pgpass.
        shown = url._replace(drivername="postgresql", password=None).render_as_string()
        raise StartError(
            "this copies SQLite alone; for PostgreSQL, use its own tool: "
            f"pg_dump --format=custom --file={shlex.quote(str(destination))} {shlex.quote(shown)}"
        )
    source = Path(url.database or "")
    if not source.is_file():
        raise StartError(f"there is no database at {source}; NOISESCALE_DATABASE_URL says which one to copy")
    if destination.exists():
        raise StartError(f"{destination} is there already; name a file that is not")
    partial = destination.with_name(destination.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        _copy(source, partial)
        partial.rename(destination)
    except (OSError, sqlite3.Error) as error:
        partial.unlink(missing_ok=True)
        raise StartError(f"{destination} cannot be written: {error}") from error
    typer.echo(f"{destination}: {destination.stat().st_size:,} bytes, checked")


def _copy(source: Path, partial: Path) -> None:
    with (
        closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True, timeout=30)) as read,
        closing(sqlite3.connect(partial)) as write,
    ):
        # In one transaction of the source: were it read in steps, each report in between would start it over.
        read.execute("BEGIN")
        read.backup(write, pages=_PAGES_PER_STEP, sleep=0)
        found = write.execute("PRAGMA integrity_check").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(f"the copy is damaged: {found}")
