"""`POST /v1/runs/{run}/blocks`: what jobs send."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from noisescale.errors import SchemaVersionError
from noisescale.wire import SCHEMA_VERSION, BlocksAccepted, BlocksReport, ErrorBody
from noisescale_server.api_errors import ApiError, error_answer
from noisescale_server.bodies import BAD_BODY, parse_body, read_body
from noisescale_server.services import Writer, services_of

router = APIRouter(tags=["reports"])
PATH = "/v1/runs/{run}/blocks"

_BEFORE_RUN, _AFTER_RUN = PATH.split("{run}")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

Reported = Annotated[
    str, Path(description="The run's name.", pattern=f"^{_NAME.pattern}$", examples=["resnet50-8gpu"])
]

EXAMPLE_REPORT: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION,
    "attempt": 1764547200000,
    "seq": 0,
    "run": {"optimizer": "sgd", "dp_world_size": 8, "micro_batch_size": 32, "accumulation_steps": 1},
    "blocks": [
        {
            "first_step": 0,
            "last_step": 9,
            "measured_steps": 10,
            "examples": 2560,
            "learning_rate": 0.1,
            "global_batch_size": 256,
            "batch_unit": "examples",
            "sums": [
                {
                    "group": "total",
                    "geometry": "euclidean",
                    "trace_covariance": 41.2,
                    "true_grad_sq_norm": 0.11,
                    "trace_covariance_sq": 171.5,
                    "true_grad_sq_norm_sq": 0.0031,
                    "product": 0.45,
                }
            ],
        }
    ],
}

_FULL: dict[int | str, dict[str, Any]] = {
    429: {
        "model": ErrorBody,
        "description": "Too many requests, or the server may hold no further run; the code says which",
    },
    503: {
        "model": ErrorBody,
        "description": "Busy, or the database does not answer; send it again after Retry-After seconds",
    },
}


@router.post(
    PATH,
    response_model=BlocksAccepted,
    responses={**BAD_BODY, **_FULL},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/BlocksReport"},
                    "example": EXAMPLE_REPORT,
                }
            },
        }
    },
)
async def post_blocks(run: Reported, request: Request, services: Writer) -> Response:
    """Take in one report of a run; answered after the commit that holds it.

    A block that was stored already is counted as a duplicate and left as it is, so a report that
    was not clearly answered may be sent again. The body may be gzipped.
    """
    if not _NAME.fullmatch(run):
        raise ApiError(
            422,
            "invalid_input",
            "run: a run's name is 1 to 128 letters, digits, dots, underscores and hyphens",
            fields=["run"],
        )
    services.require_run(run)
    body = await read_body(
        request, max_bytes=services.settings.max_body_bytes, timeout_s=services.settings.body_timeout_s
    )
    report = parse_report(body)
    accepted = await services.commits.submit(run, report, token=services.grant.id)
    return Response(accepted.model_dump_json(), media_type="application/json")


_ROUTE = router.routes[-1]


class DirectIngest:
    """Wraps an application: reports are answered here, by the same function.

    What FastAPI and Starlette do for endpoints in general costs more than a report's own work. The route
    that is left out stays for the OpenAPI document, and for every method but POST.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take in a report, or pass the request on."""
        run = _reported_run(scope)
        if run is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        request = Request(scope, receive)
        try:
            services = await services_of(request).require("write", request)
            response = await post_blocks(run, request, services)
        except Exception as error:  # noqa: BLE001  what is not an answer is raised again
            response = await error_answer(request, error)
        await response(scope, receive, send)


def _reported_run(scope: Scope) -> str | None:
    """The run that a request reports on; None where it is another request."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"]
    if not (path.startswith(_BEFORE_RUN) and path.endswith(_AFTER_RUN)):
        return None
    run = path[len(_BEFORE_RUN) : -len(_AFTER_RUN)]
    return run if run and "/" not in run else None


def parse_report(body: bytes) -> BlocksReport:
    """The report that a body holds.

    Raises:
        ApiError: 400: it is not JSON.
        SchemaVersionError: It is of a newer version.
        ValidationError: It holds a value that cannot be.
    """
    try:
        return parse_body(BlocksReport, body)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False):
            if problem["loc"] == ("schema_version",) and problem["type"] == "less_than_equal":
                given = problem["input"]
                raise SchemaVersionError(given=min(int(given), 2**53), supported=SCHEMA_VERSION) from None
        raise
