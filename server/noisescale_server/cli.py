"""The `noisescale-server` command. Beside host and port, everything is a setting."""

import asyncio
import ipaddress
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from noisescale.errors import NoiseScaleError
from noisescale_server.app import create_app
from noisescale_server.auth import any_active
from noisescale_server.commands import backup as backup_command
from noisescale_server.commands import prune as prune_command
from noisescale_server.commands import settings as settings_command
from noisescale_server.commands import stats as stats_command
from noisescale_server.commands import token as token_command
from noisescale_server.commands.on_database import on_database
from noisescale_server.connections import LimitedHttp
from noisescale_server.database import Database
from noisescale_server.errors import StartError
from noisescale_server.logs import configure_logs
from noisescale_server.settings import Settings, load_settings
from noisescale_server.tokens import TokenTable

app = typer.Typer(
    name="noisescale-server",
    help="Keep the noise scales of training runs, show them to Prometheus, and advise.\n\n"
    "Everything but host and port is set by environment variables NOISESCALE_<SETTING>.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"noisescale-server {version('noisescale')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Set up what all commands share; there is nothing but the version to print."""


@app.command(
    epilog="Examples:\n\n  noisescale-server serve\n\n"
    "  NOISESCALE_WRITE_TOKENS=secret noisescale-server serve --host 0.0.0.0 --port 8000"
)
def serve(
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = 8000,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without any token.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(min=1, max=64, help="Processes that share the port; several need PostgreSQL."),
    ] = 1,
) -> None:
    """Run the server until it is told to stop."""
    settings = load_settings()
    if workers > 1 and settings.is_sqlite:
        raise StartError(
            f"--workers {workers} needs PostgreSQL, since a SQLite database is one process'; let "
            "NOISESCALE_DATABASE_URL name one, or leave --workers out"
        )
    if not (is_loopback(host) or insecure or asyncio.run(_guarded(settings))):
        raise StartError(
            f"{host} can be reached from other machines, and there is no token, so anyone there could report "
            f"and read; set NOISESCALE_WRITE_TOKENS, make one with `noisescale-server token create`, or say "
            f"--insecure"
        )
    configure_logs(settings)
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "http": LimitedHttp,
        "ws": "none",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": round(settings.shutdown_s) or None,
    }
    if workers > 1:
        # A worker that dies is started anew, and all get the signal to end.
        uvicorn.run(f"{__name__}:{worker_app.__name__}", factory=True, workers=workers, **options)
        return
    server = uvicorn.Server(uvicorn.Config(create_app(settings), **options))
    server.run()
    if not server.started:
        raise typer.Exit(1)


def worker_app() -> FastAPI:
    """The application in one of several processes."""
    settings = load_settings()
    configure_logs(settings)
    return create_app(settings)


@app.command(epilog="Example:\n\n  NOISESCALE_DATABASE_URL=postgresql://... noisescale-server migrate")
def migrate() -> None:
    """Bring the database's tables to this version. SQLite needs it not: serve does it."""
    on_database(lambda database, _: database.migrate(), prepare=False)
    typer.echo("the database is at this version's schema")


async def _guarded(settings: Settings) -> bool:
    """Whether any token shuts the door."""
    if any_active(settings, ()):
        return True
    database = Database(settings)
    try:
        await database.prepare()
        return any_active(settings, await TokenTable(database).all())
    except (SQLAlchemyError, OSError):
        return False
    finally:
        await database.close()


app.command(epilog=settings_command.EXAMPLES)(settings_command.settings)
app.command(epilog=stats_command.EXAMPLES)(stats_command.stats)
app.command(epilog=backup_command.EXAMPLES)(backup_command.backup)
app.command(epilog=prune_command.EXAMPLES)(prune_command.prune)
app.add_typer(token_command.app, name="token")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> None:
    """Run the command; an error is one line on stderr."""
    try:
        app(prog_name="noisescale-server", standalone_mode=True)
    except NoiseScaleError as error:
        typer.echo(f"noisescale-server: {error}", err=True)
        sys.exit(1)
