"""Bearer tokens: who may write, who may read."""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal

from pydantic import SecretStr
from starlette.requests import HTTPConnection

from noisescale_server.settings import Settings

Scope = Literal["read", "write"]


class Tokens:
    """The tokens that are allowed in, as hashes.

    Where no tokens are set for a scope, nobody needs one for it.
    """

    def __init__(self, settings: Settings) -> None:
        write = _hashes(settings.write_tokens)
        read = _hashes(settings.read_tokens)
        # Who may write may look at what came of it.
        self._allowed: dict[Scope, tuple[bytes, ...]] = {"write": write, "read": read + write if read else ()}

    @property
    def required_for_writing(self) -> bool:
        """Whether reports need a token."""
        return bool(self._allowed["write"])

    def allows(self, scope: Scope, connection: HTTPConnection) -> bool:
        """Whether a request may do what needs `scope`; takes as long for any wrong token."""
        allowed = self._allowed[scope]
        if not allowed:
            return True
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        given = _hash(token.strip())
        found = False
        for one in allowed:
            found |= hmac.compare_digest(one, given)
        return found and scheme.lower() == "bearer"


def _hashes(tokens: Sequence[SecretStr]) -> tuple[bytes, ...]:
    return tuple(_hash(token.get_secret_value()) for token in tokens)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", errors="surrogateescape")).digest()
