"""`noisescale-server token`: make, list and revoke tokens that the database holds."""

import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from noisescale_server.commands.on_database import on_database
from noisescale_server.errors import StartError
from noisescale_server.tokens import NAME, SCOPES, Scope, StoredToken, TokenTable

_T = TypeVar("_T")
_PREFIX = re.compile(r"[A-Za-z0-9._-]{0,128}")
_DAY_S = 86_400.0

app = typer.Typer(
    help="Make, list and revoke tokens. A server takes notice within seconds; no restart is needed.",
    no_args_is_help=True,
)


@app.command(
    epilog="Examples:\n\n  noisescale-server token create ci --scope write\n\n"
    "  noisescale-server token create vision-team --scope write --prefix vision- --days 90"
)
def create(
    name: Annotated[str, typer.Argument(help="What to call it; shown in the list.")],
    scope: Annotated[str, typer.Option(help="read, write (reads too) or admin (does everything).")] = "write",
    prefix: Annotated[str, typer.Option(help="Sees and writes only runs whose names start with this.")] = "",
    days: Annotated[
        float | None, typer.Option(help="Expires after so many days; otherwise it does not.")
    ] = None,
) -> None:
    """Make a token and print its secret, which is shown this once and kept nowhere."""
    chosen = next((one for one in SCOPES if one == scope), None)
    if chosen is None:
        raise StartError(f"--scope is {', '.join(SCOPES)}, got {scope!r}")
    if not _PREFIX.fullmatch(prefix):
        raise StartError(
            f"--prefix is the start of run names: up to 128 letters, digits, dots, underscores and hyphens, "
            f"got {prefix!r}"
        )
    if not re.search(NAME, name):
        raise StartError("a token's name has 1 to 128 characters, and no control characters")
    if days is not None and not 0 < days < 36_500:
        raise StartError(f"--days is a number of days above 0, got {days!r}")
    _, secret = _with_table(lambda table: _create(table, name, chosen, prefix, days))
    typer.echo(secret)


@app.command("list", epilog="Example:\n\n  noisescale-server token list")
def list_tokens() -> None:
    """Print every token that was made, without its secret."""
    found = _with_table(lambda table: table.all())
    typer.echo(f"{'id':10}{'scope':7}{'state':10}{'runs':24}{'made':12}name")
    for token in found:
        made = time.strftime("%Y-%m-%d", time.gmtime(token.created_at))
        typer.echo(
            f"{token.id:10}{token.scope:7}{_state(token):10}{token.prefix + '*':24}{made:12}{token.name}"
        )


@app.command(epilog="Example:\n\n  noisescale-server token revoke 1f0c9a2b")
def revoke(token_id: Annotated[str, typer.Argument(help="As the list shows it.")]) -> None:
    """Shut a token out, for good."""
    revoked = _with_table(lambda table: table.revoke(token_id))
    typer.echo(f"{revoked.id} ({revoked.name}) is revoked")


async def _create(
    table: TokenTable, name: str, scope: Scope, prefix: str, days: float | None
) -> tuple[StoredToken, str]:
    expires_at = None if days is None else time.time() + days * _DAY_S
    return await table.create(name=name, scope=scope, prefix=prefix, expires_at=expires_at)


def _state(token: StoredToken) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "active" if token.is_active(now=time.time()) else "expired"


def _with_table(work: Callable[[TokenTable], Awaitable[_T]]) -> _T:
    """Do something with the database's tokens."""
    return on_database(lambda database, _: work(TokenTable(database)))
