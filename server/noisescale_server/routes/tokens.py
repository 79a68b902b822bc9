"""`/v1/tokens`: what `noisescale-server token` does, over HTTP; for admin tokens."""

import time
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from noisescale.wire import ErrorBody
from noisescale_server.api_errors import ApiError
from noisescale_server.bodies import BAD_BODY, parse_body, read_body
from noisescale_server.services import Admin
from noisescale_server.tokens import NAME, Scope, StoredToken

router = APIRouter(tags=["tokens"])

_DAY_S = 86_400.0
_MOST_BYTES = 8192
Prefix = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,128}$")]


class TokenRequest(BaseModel):
    """The token to make.

    Attributes:
        name: What to call it; shown in the list.
        scope: "read", "write" (reads too) or "admin" (does everything).
        prefix: It sees and writes only runs whose names start with this.
        days: It expires after so many; null: it does not.
    """

    model_config = ConfigDict(strict=True)

    name: Annotated[str, StringConstraints(pattern=NAME)]
    scope: Scope = "write"
    prefix: Prefix = ""
    days: Annotated[float, Field(gt=0, lt=36_500)] | None = None


class TokenInfo(BaseModel):
    """A token, without its secret. Times are Unix times in seconds.

    Attributes:
        id: Names it in logs and when it is revoked.
        active: Whether it opens anything now.
    """

    id: str
    name: str
    scope: Scope
    prefix: str
    active: bool
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class TokenMade(TokenInfo):
    """A new token.

    Attributes:
        secret: What to send as `Authorization: Bearer SECRET`; shown this once and kept nowhere.
    """

    secret: str


class TokenList(BaseModel):
    """Every token that was made, oldest first; those that are set by variable are not among them."""

    tokens: list[TokenInfo]


@router.get("/v1/tokens", response_model=TokenList)
async def list_tokens(services: Admin) -> TokenList:
    """Every token that was made and whose prefix lies within that of the one that asks."""
    found = await services.token_table.all()
    return TokenList(tokens=[_info(token) for token in found if services.grant.covers(token.prefix)])


@router.post(
    "/v1/tokens",
    response_model=TokenMade,
    status_code=201,
    responses=BAD_BODY,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/TokenRequest"},
                    "example": {"name": "vision-team", "scope": "write", "prefix": "vision-", "days": 90},
                }
            },
        }
    },
)
async def create_token(request: Request, services: Admin) -> TokenMade:
    """Make a token, within the prefix of the one that asks."""
    wanted = parse_body(
        TokenRequest,
        await read_body(request, max_bytes=_MOST_BYTES, timeout_s=services.settings.body_timeout_s),
    )
    if not services.grant.covers(wanted.prefix):
        raise ApiError(
            403,
            "forbidden",
            f"prefix: this token may make only tokens whose prefix starts with {services.grant.prefix!r}",
            fields=["prefix"],
        )
    expires_at = None if wanted.days is None else time.time() + wanted.days * _DAY_S
    made, secret = await services.token_table.create(
        name=wanted.name, scope=wanted.scope, prefix=wanted.prefix, expires_at=expires_at
    )
    services.tokens.forget()
    return TokenMade(**_info(made).model_dump(), secret=secret)


@router.delete(
    "/v1/tokens/{token_id}",
    response_model=TokenInfo,
    responses={404: {"model": ErrorBody, "description": "No such token"}, 422: BAD_BODY[422]},
)
async def revoke_token(
    token_id: Annotated[str, StringConstraints(max_length=64)], services: Admin
) -> TokenInfo:
    """Shut a token out, for good; here at once, on other replicas within seconds."""
    revoked = await services.token_table.revoke(token_id, within=services.grant.prefix)
    services.tokens.forget()
    return _info(revoked)


def _info(token: StoredToken) -> TokenInfo:
    return TokenInfo(
        id=token.id,
        name=token.name,
        scope=token.scope,
        prefix=token.prefix,
        active=token.is_active(now=time.time()),
        created_at=token.created_at,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
    )
