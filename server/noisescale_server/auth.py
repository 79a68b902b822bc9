"""Who may do what: bearer tokens, from settings and from the database.

Where there is no token at all, anybody may read and write (the command sees to it that then only this machine
gets in, unless it is told --insecure); administering always needs a token. One token that was ever made or
set shuts the door, also after it was revoked.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog
from pydantic import SecretStr
from sqlalchemy.exc import SQLAlchemyError

from noisescale_server.errors import StoreUnavailableError
from noisescale_server.settings import Settings
from noisescale_server.tokens import SCOPES, Scope, StoredToken, TokenTable, hash_of

_log = structlog.get_logger(__name__)

REFRESH_S = 5.0
"""After so many seconds at most a token that was revoked elsewhere is refused here."""

_MISS_REFRESH_S = 1.0
"""An unknown token makes the table be read again, but not more often than this."""

_LOAD_TIMEOUT_S = 5.0
_LIMITED = re.compile(r"([A-Za-z0-9._-]{1,128})\*:(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request may do.

    Attributes:
        id: Whose it is; no secret. None where no token was needed.
        scope: The most that it may do.
        prefix: It sees and writes only runs whose names start with this.
    """

    id: str | None
    scope: Scope
    prefix: str = ""

    def allows(self, scope: Scope) -> bool:
        """Whether it may do what needs `scope`."""
        return SCOPES.index(scope) <= SCOPES.index(self.scope)

    def covers(self, run: str) -> bool:
        """Whether a run is one of those it may see and write."""
        return run.startswith(self.prefix)


EVERYBODY = Grant(id=None, scope="write")
_EVERY_READER = Grant(id=None, scope="read")


class Tokens:
    """All tokens, as hashes; those of the database as it was at most REFRESH_S ago.

    A token is looked up by a digest that is keyed with a number of this process, and then compared in
    constant time, so how long a wrong one takes says nothing about the right ones.
    """

    def __init__(self, settings: Settings, table: TokenTable) -> None:
        self._table = table
        self._key = secrets.token_bytes(32)
        self._open_reading = settings.open_reading
        self._set = self._index(_of_settings(settings))
        self._made: dict[bytes, tuple[str, Grant, float | None]] = {}
        self._any_made = False
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    async def grant(self, authorization: str | None) -> Grant | None:
        """What a request may do; None where it needs a token, and has none or a wrong one.

        Args:
            authorization: The header, as Starlette decodes it (Latin-1).

        Raises:
            StoreUnavailableError: The database was never reached, so its tokens are not known.
        """
        await self._refresh(REFRESH_S)
        if authorization is None:
            return self._without()
        found = self._presented(authorization)
        if found is None:
            return self._without() if self._is_open else None
        secret, most = found
        known = self._find(secret)
        if known is None and not self._is_open and await self._refresh(_MISS_REFRESH_S):
            known = self._find(secret)
        if known is None:
            # On a server that is open to everybody a superfluous token does no harm.
            return EVERYBODY if self._is_open else None
        return known if most is None else Grant(known.id, most, known.prefix)

    def forget(self) -> None:
        """Read the table again before the next request is let in."""
        self._read_at = None

    @property
    def _is_open(self) -> bool:
        return not (self._set or self._any_made)

    def _without(self) -> Grant | None:
        if self._is_open:
            return EVERYBODY
        return _EVERY_READER if self._open_reading else None

    @staticmethod
    def _presented(authorization: str) -> tuple[bytes, Scope | None] | None:
        """The secret, and the most that presenting it in this way allows."""
        scheme, _, credentials = authorization.partition(" ")
        credentials = credentials.strip()
        if scheme.lower() == "bearer":
            return credentials.encode("latin-1", errors="replace"), None
        if scheme.lower() == "basic":
            # For browsers, which ask for a user and a password by themselves; any user, the token as the
            # password. They also send it along with what other sites make them ask, so it only reads.
            try:
                return base64.b64decode(credentials, validate=True).partition(b":")[2], "read"
            except (binascii.Error, ValueError):
                return None
        return None

    def _find(self, secret: bytes) -> Grant | None:
        digest = hash_of(secret)
        keyed = self._keyed(digest)
        found = self._set.get(keyed) or self._made.get(keyed)
        if found is None or not hmac.compare_digest(found[0], digest):
            return None
        _, grant, expires_at = found
        return None if expires_at is not None and time.time() >= expires_at else grant

    async def _refresh(self, max_age_s: float) -> bool:
        """Read the table again if it was read longer ago than this; whether it was."""
        if self._is_fresh(max_age_s):
            return False
        async with self._reading:
            if self._is_fresh(max_age_s):
                return True  # another request has just read it
            try:
                async with asyncio.timeout(_LOAD_TIMEOUT_S):
                    made = await self._table.all()
            except (SQLAlchemyError, OSError) as error:  # TimeoutError is an OSError
                if self._read_at is None:
                    raise StoreUnavailableError from error
                _log.warning("tokens not read; the known ones stay valid", error=type(error).__name__)
                self._read_at = time.monotonic()
                return False
            now = time.time()
            self._made = self._index(
                (token.hash, Grant(token.id, token.scope, token.prefix), token.expires_at)
                for token in made
                if token.is_active(now=now)
            )
            self._any_made = self._any_made or bool(made)
            self._read_at = time.monotonic()
            return True

    def _is_fresh(self, max_age_s: float) -> bool:
        return self._read_at is not None and time.monotonic() - self._read_at < max_age_s

    def _index(
        self, found: Iterable[tuple[str, Grant, float | None]]
    ) -> dict[bytes, tuple[str, Grant, float | None]]:
        return {self._keyed(one[0]): one for one in found}

    def _keyed(self, digest: str) -> bytes:
        return hashlib.blake2b(digest.encode(), key=self._key, digest_size=16).digest()


def any_active(settings: Settings, made: Sequence[StoredToken]) -> bool:
    """Whether any token opens anything now."""
    now = time.time()
    return bool(_of_settings(settings)) or any(token.is_active(now=now) for token in made)


def _of_settings(settings: Settings) -> list[tuple[str, Grant, float | None]]:
    # Not told apart any further: an id made from the secret could be used to guess it, and one made
    # from the place in the list would change with each rotation.
    found: list[tuple[str, Grant, float | None]] = []
    for scope, token in _tokens(settings):
        prefix, secret = _parted(token.get_secret_value())
        name = f"settings:{scope}:{prefix}" if prefix else f"settings:{scope}"
        found.append((hash_of(secret), Grant(name, scope, prefix), None))
    return found


def _tokens(settings: Settings) -> list[tuple[Scope, SecretStr]]:
    return (
        [("read", token) for token in settings.read_tokens]
        + [("write", token) for token in settings.write_tokens]
        + [("admin", token) for token in settings.admin_tokens]
    )


def _parted(text: str) -> tuple[str, str]:
    """Prefix and secret."""
    limited = _LIMITED.fullmatch(text)
    return (limited[1], limited[2]) if limited else ("", text)
