"""Tokens that the database holds, hashed; made, listed and revoked by `noisescale-server token`."""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Row, insert, select, update

from noisescale_server.database import Database
from noisescale_server.errors import UnknownTokenError
from noisescale_server.schema import tokens

Scope = Literal["read", "write", "admin"]
"""What a token may do; each may also do what those before it may."""

SCOPES: tuple[Scope, ...] = ("read", "write", "admin")
SECRET_START = "noisescale_"  # noqa: S105  the start of all of them
"""What every token that is made here starts with, so that scanners for leaked secrets can find it."""

NAME = r"^[^\x00-\x1f\x7f-\x9f]{1,128}$"
"""What a token may be called: no control characters, which a terminal would obey."""

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class StoredToken:
    """A token, without its secret.

    Attributes:
        id: Names it in logs and to `revoke`; no secret.
        name: What its maker called it.
        prefix: It sees and writes only runs whose names start with this.
        hash: SHA-256 of the secret, in hexadecimal.
        created_at, expires_at, revoked_at: Unix times; null: does not, or is not.
    """

    id: str
    name: str
    scope: Scope
    prefix: str
    hash: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def is_active(self, *, now: float) -> bool:
        """Whether it opens anything at this Unix time."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class TokenTable:
    """The tokens of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self, *, name: str, scope: Scope, prefix: str = "", expires_at: float | None = None
    ) -> tuple[StoredToken, str]:
        """Make a token; the secret that is returned with it is not kept anywhere."""
        secret = SECRET_START + secrets.token_urlsafe(_SECRET_BYTES)
        made = StoredToken(
            id=secrets.token_hex(4),
            name=name,
            scope=scope,
            prefix=prefix,
            hash=hash_of(secret),
            created_at=time.time(),
            expires_at=expires_at,
            revoked_at=None,
        )
        async with self._database.writing() as connection:
            values = {column.name: getattr(made, column.name) for column in tokens.c}
            await connection.execute(insert(tokens).values(values))
        return made, secret

    async def all(self) -> Sequence[StoredToken]:
        """Every token that was ever made, oldest first."""
        async with self._database.reading() as connection:
            found = await connection.execute(select(tokens).order_by(tokens.c.created_at, tokens.c.id))
            return [_token(row) for row in found]

    async def revoke(self, token_id: str, *, within: str = "") -> StoredToken:
        """Shut one out; it stays in the list. Revoking it again changes nothing.

        Args:
            token_id: Of the token.
            within: Only if its prefix starts with this.

        Raises:
            UnknownTokenError: There is none of that id.
        """
        async with self._database.writing() as connection:
            row = (await connection.execute(select(tokens).where(tokens.c.id == token_id))).one_or_none()
            if row is None or not row.prefix.startswith(within):
                raise UnknownTokenError(token_id)
            revoked_at = time.time() if row.revoked_at is None else row.revoked_at
            await connection.execute(
                update(tokens).where(tokens.c.id == token_id).values(revoked_at=revoked_at)
            )
            changed = await connection.execute(select(tokens).where(tokens.c.id == token_id))
            return _token(changed.one())


def hash_of(secret: str | bytes) -> str:
    """What is kept of a token's secret. SHA-256 is enough for 256 random bits: nobody can try them all."""
    return hashlib.sha256(secret if isinstance(secret, bytes) else secret.encode()).hexdigest()


def _token(row: Row[Any]) -> StoredToken:
    return StoredToken(**row._mapping)
