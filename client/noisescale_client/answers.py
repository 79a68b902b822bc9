"""A server's answers, read: errors by their status and body, and models."""

from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from noisescale.wire import ErrorBody, ErrorDetail
from noisescale_client.errors import (
    RequestRefusedError,
    UnauthorizedError,
    UnexpectedAnswerError,
    UnknownRunError,
)
from noisescale_client.transport import Answer

Model = TypeVar("Model", bound=BaseModel)

_SHOWN_CHARACTERS = 200


def error_of(answer: Answer) -> RequestRefusedError | None:
    """The error that an answer stands for; None for 2xx.

    A redirect counts as an error: a report is not sent elsewhere than where it was told to go.
    """
    if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
        return None
    if answer.status < HTTPStatus.BAD_REQUEST:
        to = answer.headers.get("Location", "somewhere else")
        detail = f"it redirects to {to[:_SHOWN_CHARACTERS]}; give that server's URL instead"
        return RequestRefusedError(status=answer.status, detail=detail)
    error = _detail(answer)
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return UnauthorizedError(status=answer.status, detail=error.message)
    if answer.status == HTTPStatus.NOT_FOUND and error.code == "unknown_run":
        return UnknownRunError(detail=error.message, nearest=error.nearest)
    return RequestRefusedError(status=answer.status, detail=error.message, fields=error.fields)


def read(answer: Answer, model: type[Model], *, url: str) -> Model:
    """The model that an answer holds.

    Raises:
        RequestRefusedError: The answer is an error.
        UnexpectedAnswerError: It is not what this version expects there.
    """
    error = error_of(answer)
    if error is not None:
        raise error
    try:
        return model.model_validate_json(answer.body)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnexpectedAnswerError(
            url=url, status=answer.status, problem=f"{where}: {first['msg']}" if where else first["msg"]
        ) from wrong


def _detail(answer: Answer) -> ErrorDetail:
    try:
        return ErrorBody.model_validate_json(answer.body).error
    except ValidationError:  # a proxy's page, or an older server
        text = " ".join(answer.body.decode("utf-8", errors="replace").split())
        shown = text[:_SHOWN_CHARACTERS] or _phrase(answer.status)
        return ErrorDetail(code="unknown", message=shown)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no message"
