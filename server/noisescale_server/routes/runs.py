"""`/v1/runs`: which runs there are, and how they stand."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from noisescale.blocks import TOTAL, Geometry
from noisescale.errors import InvalidInputError
from noisescale.wire import ErrorBody, RunDetail, RunList, Series
from noisescale_server.series import series_of
from noisescale_server.services import Reader
from noisescale_server.summaries import summary_of

router = APIRouter(tags=["runs"])

RunName = Annotated[str, Path(description="A run's name.", examples=["resnet50-8gpu"], max_length=512)]
Step = Annotated[int | None, Query(ge=0, le=2**53)]
UNKNOWN: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "No such run; names the nearest"},
    409: {"model": ErrorBody, "description": "What the run reported cannot be evaluated"},
    422: {"model": ErrorBody, "description": "A value that cannot be"},
}
_MOST_LISTED = 1000


@router.get("/v1/runs", response_model=RunList, responses={422: UNKNOWN[422]})
async def list_runs(
    services: Reader,
    name_contains: Annotated[str | None, Query(max_length=128, description="Part of the name.")] = None,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED, description="At most so many.")] = 100,
) -> RunList:
    """The runs that this server knows, the one that reported last first."""
    found = await services.store.runs(name_contains=name_contains, limit=limit)
    standings = await services.standings.of_all(found)
    return RunList(runs=[summary_of(run, standing, services) for run, standing in standings])


@router.get("/v1/runs/{run}", response_model=RunDetail, responses=UNKNOWN)
async def get_run(run: RunName, services: Reader) -> RunDetail:
    """All that is known of one run."""
    stored = await services.store.run(run)
    standing = await services.standings.of(stored)
    attempts = await services.store.attempts(stored.id)
    return RunDetail(
        **summary_of(stored, standing, services).model_dump(),
        info=stored.info,
        attempts=[number for number, _ in attempts],
        phase=standing.phase,
        estimates=list(standing.estimates),
        steps=stored.steps,
        examples=stored.examples,
        skipped_steps=stored.skipped_steps,
        dropped_blocks=sum(dropped for _, dropped in attempts),
    )


@router.get("/v1/runs/{run}/series", response_model=Series, responses=UNKNOWN)
async def get_series(
    run: RunName,
    services: Reader,
    group: Annotated[str, Query(max_length=128, description="Layer group.")] = TOTAL,
    geometry: Geometry = "euclidean",
    from_step: Step = None,
    to_step: Step = None,
    max_points: Annotated[int, Query(ge=2, description="At most so many, evenly chosen.")] = 300,
) -> Series:
    """The noise scale of one run as it stood at each block's end, over the window that ends there."""
    most = services.settings.max_series_points
    if max_points > most:
        raise InvalidInputError(f"max_points may be at most {most}, got {max_points}", field="max_points")
    stored = await services.store.run(run)
    blocks = await services.store.blocks(stored.id, to_step=to_step)
    return series_of(
        blocks,
        run=stored.name,
        group=group,
        geometry=geometry,
        from_step=from_step or 0,
        max_points=max_points,
        window_steps=services.settings.window_steps,
    )
