"""`/healthz` and `/readyz`, for whoever starts and stops this process."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from noisescale.wire import ErrorBody
from noisescale_server.services import services_of

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """Always `ok`; otherwise the answer is an error."""

    status: str = "ok"


@router.get("/healthz", response_model=Health)
async def get_health() -> Health:
    """The process lives; says nothing of the database."""
    return Health()


@router.get(
    "/readyz",
    response_model=Health,
    responses={503: {"model": ErrorBody, "description": "The database does not answer, or does not store"}},
)
async def get_readiness(request: Request) -> Health:
    """The database answers, so reports can be stored; where the last ones could not, a write is tried."""
    services = services_of(request)
    await services.store.check(writes=services.commits.is_failing)
    return Health()
