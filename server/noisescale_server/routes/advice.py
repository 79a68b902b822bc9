"""`/recommend`: advice on a run, or on numbers that are given."""

import difflib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from noisescale.advice import Recommendation, RecommendRequest, WhatIf
from noisescale.errors import NotMeasuredError
from noisescale.recommend import recommend, recommend_run
from noisescale.wire import ErrorBody
from noisescale_server.api_errors import ApiError
from noisescale_server.bodies import BAD_BODY, parse_body, read_body
from noisescale_server.routes.runs import UNKNOWN
from noisescale_server.services import Reader

router = APIRouter(tags=["advice"])

EXAMPLE_REQUEST: dict[str, Any] = {
    "optimizer": "sgd",
    "global_batch_size": 256,
    "learning_rate": 0.1,
    "noise_scale": {"value": 15000, "lower": 10000, "upper": 22000},
    "dp_world_size": 8,
    "micro_batch_size": 32,
    "accumulation_steps": 1,
    "max_micro_batch_size": 64,
    "measured_steps": 500,
}
_TEXT: dict[str, Any] = {
    "description": "The advice; with `Accept: text/plain` its explanation alone",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}


class RunQuery(WhatIf):
    """The query of `GET /recommend`: a run, and what to suppose of it instead of what it reported."""

    run: Annotated[str, Query(description="The run's name.", examples=["resnet50-8gpu"], max_length=512)]


@router.get(
    "/recommend",
    response_model=Recommendation,
    responses={
        **UNKNOWN,
        200: _TEXT,
        409: {
            "model": ErrorBody,
            "description": "The run has not measured a step yet, or what it reported cannot be evaluated",
        },
    },
)
async def get_recommendation(
    request: Request, query: Annotated[RunQuery, Query()], services: Reader
) -> Response:
    """Advice on a run's batch and learning rate, with reasons, interval and sources.

    Every parameter but `run` overrides what the run reported.
    """
    stored = await services.store.run(query.run)
    what_if = WhatIf.model_validate(query.model_dump(exclude={"run"}))
    standing = await services.standings.of(stored)
    if what_if == WhatIf() and standing.recommendation is None:
        raise NotMeasuredError(
            f"run {stored.name} has not measured a step yet; ask again after its first block"
        )
    answer = (
        standing.recommendation
        if what_if == WhatIf() and standing.recommendation is not None
        else recommend_run(
            standing.tail, stored.info, what_if=what_if, window_steps=services.settings.window_steps
        )
    )
    return _answer(request, answer)


@router.post(
    "/recommend",
    response_model=Recommendation,
    responses={200: _TEXT, **BAD_BODY},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/RecommendRequest"},
                    "example": EXAMPLE_REQUEST,
                }
            },
        }
    },
)
async def post_recommendation(request: Request, services: Reader) -> Response:
    """Advice on numbers that are given; no run is needed."""
    # Read here and not by FastAPI, which would read a body of any size, and before it asks for a token.
    body = await read_body(
        request, max_bytes=services.settings.max_body_bytes, timeout_s=services.settings.body_timeout_s
    )
    return _answer(request, recommend(parse_body(RecommendRequest, body)))


def check_query_names(request: Request) -> None:
    """Refuse a parameter that there is not, and name the nearest that there is.

    Raises:
        ApiError: 422.
    """
    known = list(RunQuery.model_fields)
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ApiError(422, "unknown_parameter", f"a parameter is not one that there is; {hint}")


def _answer(request: Request, answer: Recommendation) -> Response:
    if _wants_text(request.headers.get("accept", "")):
        return Response(answer.explanation + "\n", media_type="text/plain")
    return Response(answer.model_dump_json(), media_type="application/json")


def _wants_text(accept: str) -> bool:
    """Whether text is named, and JSON is not, or later."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    if "text/plain" not in kinds:
        return False
    return "application/json" not in kinds or kinds.index("text/plain") < kinds.index("application/json")
