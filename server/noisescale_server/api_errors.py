"""Errors in HTTP: every 4xx and 5xx answer is a noisescale.wire.ErrorBody, and never repeats the input."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from noisescale.errors import (
    ContradictionError,
    InvalidInputError,
    NoiseScaleError,
    NotMeasuredError,
    SchemaVersionError,
)
from noisescale.wire import ErrorBody, ErrorDetail
from noisescale_server.errors import (
    BadRunError,
    QueueFullError,
    StoreUnavailableError,
    TooManyGroupsError,
    TooManyRunsError,
    UnknownRunError,
    UnknownTokenError,
)

_log = structlog.get_logger(__name__)
_SHOWN_PROBLEMS = 5
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_FREE_NAMES = ("labels", "versions")
"""What these hold has names that the sender chose."""

_DOMAIN: tuple[tuple[type[NoiseScaleError], int, str], ...] = (
    (UnknownRunError, 404, "unknown_run"),
    (UnknownTokenError, 404, "unknown_token"),
    (BadRunError, 409, "bad_run"),
    (NotMeasuredError, 409, "not_measured_yet"),
    (ContradictionError, 422, "contradiction"),
    (InvalidInputError, 422, "invalid_input"),
    (SchemaVersionError, 422, "schema_version"),
    (TooManyRunsError, 429, "too_many_runs"),
    (TooManyGroupsError, 422, "too_many_groups"),
    (QueueFullError, 503, "busy"),
    (StoreUnavailableError, 503, "store_unavailable"),
)
_RETRY_AFTER_S = {"busy": "1", "store_unavailable": "5", "too_many_runs": "60"}


class ApiError(Exception):
    """An answer that is not the one asked for.

    Attributes:
        status: HTTP status.
        detail: The body.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        fields: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(code=code, message=message, fields=list(fields))
        self.headers = headers


def add_error_handlers(app: FastAPI) -> None:
    """Make every error an ErrorBody."""
    for kind, handler in _handlers():
        app.add_exception_handler(kind, handler)


async def error_answer(request: Request, error: Exception) -> Response:
    """The answer that an error is for a request that FastAPI does not see.

    Raises:
        Exception: The error itself, where it was not expected.
    """
    for kind, handler in _handlers():
        if isinstance(error, kind):
            return await handler(request, error)
    raise error


def error_response(status: int, detail: ErrorDetail, headers: Mapping[str, str] | None = None) -> Response:
    """One error as an answer."""
    sent = dict(headers or {})
    if detail.code in _RETRY_AFTER_S:
        sent["Retry-After"] = _RETRY_AFTER_S[detail.code]
    return JSONResponse(ErrorBody(error=detail).model_dump(), status_code=status, headers=sent)


def validation_detail(problems: Sequence[Any]) -> ErrorDetail:
    """What was wrong with an input, without the input."""
    said: list[str] = []
    fields: list[str] = []
    for problem in problems[:_SHOWN_PROBLEMS]:
        where = _place(problem["loc"])
        fields.append(where)
        message = re.sub(r"^Value error, ", "", problem["msg"])
        said.append(f"{where}: {message[:300]}" if where else message[:300])
    more = len(problems) - len(said)
    if more > 0:
        said.append(f"and {more} more")
    return ErrorDetail(code="invalid_input", message="; ".join(said), fields=fields)


def _place(loc: Sequence[str | int]) -> str:
    """Where in an input something is wrong, without what the sender named."""
    parts: list[str] = []
    for part in loc:
        if part in _FREE_NAMES:
            return ".".join([*parts, str(part)])
        if part not in ("body", "query", "path"):
            parts.append(str(part))
    return ".".join(parts)[:200]


async def _api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error_response(error.status, error.detail, error.headers)


async def _domain_error(_: Request, error: Exception) -> Response:
    found = next(((status, code) for kind, status, code in _DOMAIN if isinstance(error, kind)), None)
    if found is None:
        raise error
    status, code = found
    fields: list[str] = []
    if isinstance(error, ContradictionError):
        fields = list(error.fields)
    elif isinstance(error, InvalidInputError):
        fields = [error.field]
    elif isinstance(error, SchemaVersionError):
        fields = ["schema_version"]
    nearest = error.nearest if isinstance(error, UnknownRunError) else []
    detail = ErrorDetail(code=code, message=str(error), fields=fields, nearest=nearest)
    return error_response(status, detail)


async def _request_invalid(_: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        problems: Sequence[Any] = error.errors()
    elif isinstance(error, ValidationError):
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    else:
        raise error
    return error_response(422, validation_detail(problems))


async def _database_error(_: Request, error: Exception) -> Response:
    _log.error("database failed", error=type(getattr(error, "orig", None) or error).__name__)
    unavailable = StoreUnavailableError()
    return error_response(503, ErrorDetail(code="store_unavailable", message=str(unavailable)))


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is nothing at this address; {request.base_url}docs lists what there is"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods_at(request))
    return error_response(error.status_code, ErrorDetail(code="http", message=message), headers)


def _methods_at(request: Request) -> list[str]:
    """All that may be done at an address; Starlette names those of the first route alone."""
    return [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]


def internal_error() -> Response:
    """The answer where the server itself is at fault."""
    return error_response(
        500, ErrorDetail(code="internal", message="the server failed at this; its log has the reason")
    )


def _handlers() -> tuple[tuple[type[Exception], Callable[[Request, Exception], Awaitable[Response]]], ...]:
    return (
        (ApiError, _api_error),
        (NoiseScaleError, _domain_error),
        (RequestValidationError, _request_invalid),
        (ValidationError, _request_invalid),
        (SQLAlchemyError, _database_error),
        (OSError, _database_error),  # where PostgreSQL cannot be connected to, its driver raises this
        (HTTPException, _http_error),
    )
