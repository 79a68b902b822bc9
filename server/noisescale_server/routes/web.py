"""`/` and the pages behind it, for a browser."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, quote, urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, StreamingResponse
from fastapi.routing import APIRoute

from noisescale.blocks import TOTAL, Geometry
from noisescale.errors import NoiseScaleError
from noisescale_server.api_errors import ApiError, validation_detail
from noisescale_server.bodies import read_body
from noisescale_server.errors import UnknownRunError
from noisescale_server.routes.runs import RunName
from noisescale_server.services import Reader, Services, address_of, services_of
from noisescale_server.store import StoredRun
from noisescale_server.web.assets import assets, assets_version
from noisescale_server.web.charts import RUN_POINTS, charts_of, geometry_keys, group_keys, multiples_of
from noisescale_server.web.compare import MOST_COMPARED, compare_runs
from noisescale_server.web.history import History
from noisescale_server.web.listing import ListQuery, list_runs
from noisescale_server.web.pages import base_of, page
from noisescale_server.web.planner import OPTIMIZERS, base_of_run, base_without_run, plan
from noisescale_server.web.run_view import view_run
from noisescale_server.web.sign_in import COOKIE, KEPT_S, from_another_site, local_path
from noisescale_server.web.table import csv_of

_FOREVER = "public, max-age=31536000, immutable"
_MOST_FORM_BYTES = 8192


class PageRoute(APIRoute):
    """Answers errors with a page, and asks for a token where one is needed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint, wrapped."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                if error.status != 401:
                    raise
                wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                address = f"{base_of(request)}/sign-in?{urlencode({'next': wanted})}"
                return RedirectResponse(address, status_code=303)
            except UnknownRunError as error:
                return page(
                    request,
                    "error.html",
                    status=404,
                    title="No such run",
                    text="There is no run of that name.",
                    nearest=error.nearest,
                )
            except RequestValidationError as error:
                text = validation_detail(error.errors()).message
                return page(request, "error.html", status=422, title="Not a page", text=text, nearest=[])

        return answer


router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/")
async def get_runs_page(request: Request, query: Annotated[ListQuery, Query()], services: Reader) -> Response:
    """Every run on one line."""
    return page(request, "runs.html", listing=await list_runs(services, query), most_compared=MOST_COMPARED)


@router.get("/runs/{run}")
async def get_run_page(request: Request, run: RunName, services: Reader) -> Response:
    """One run, with its charts."""
    stored = await services.store.run(run)
    standing = await services.standings.of(stored)
    view = await view_run(services, stored, standing)
    return page(request, "run.html", draws=True, view=view)


@router.get("/runs/{run}/charts.json")
async def get_charts(
    run: RunName,
    services: Reader,
    max_points: Annotated[int, Query(ge=10, le=RUN_POINTS)] = RUN_POINTS,
) -> Response:
    """What the run's charts draw."""
    stored = await services.store.run(run)
    standing = await services.standings.of(stored)
    restarts = await services.store.restarts(stored.id)
    history = await _history(services, stored)
    charts = await asyncio.to_thread(
        charts_of,
        history,
        run=stored.name,
        version=stored.version,
        advice=standing.recommendation,
        restarts=restarts,
        max_points=max_points,
    )
    return Response(charts.model_dump_json(), media_type="application/json")


@router.get("/runs/{run}/multiples.json")
async def get_multiples(run: RunName, by: Literal["group", "geometry"], services: Reader) -> Response:
    """What the run's small charts draw."""
    stored = await services.store.run(run)
    standing = await services.standings.of(stored)
    keys = (
        group_keys(standing.estimates, optimizer=stored.info.optimizer)
        if by == "group"
        else geometry_keys(standing.estimates)
    )
    history = await _history(services, stored)
    found = await asyncio.to_thread(multiples_of, history, keys, by=by)
    content = ",".join(multiple.model_dump_json() for multiple in found)
    return Response(f"[{content}]", media_type="application/json")


@router.get("/runs/{run}/series.csv")
async def get_csv(
    run: RunName,
    services: Reader,
    group: Annotated[str, Query(max_length=128)] = TOTAL,
    geometry: Geometry = "euclidean",
) -> Response:
    """Every point of one series."""
    stored = await services.store.run(run)
    history = await _history(services, stored)
    name = quote(f"{stored.name}-{group}-{geometry}.csv")
    return StreamingResponse(
        csv_of(history, group=group, geometry=geometry),
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


@router.get("/compare")
async def get_compare_page(
    request: Request, services: Reader, run: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Runs beside each other."""
    view = await compare_runs(services, run or [])
    return page(request, "compare.html", draws=True, view=view, most_compared=MOST_COMPARED)


@router.get("/plan")
async def get_plan_page(request: Request, services: Reader) -> Response:
    """What if: another layout, and what follows from it."""
    raw = {name: value for name, value in request.query_params.items() if value.strip()}
    base = base_without_run()
    if "run" in raw:
        stored = await services.store.run(raw["run"])
        base = base_of_run(await services.standings.of(stored), stored.info)
    view = plan(raw, base)
    names = [run.name for run in await services.store.runs(limit=100)]
    return page(request, "plan.html", draws=True, view=view, optimizers=OPTIMIZERS, names=names)


@router.get("/static/{version}/{name}")
async def get_asset(request: Request, version: str, name: str) -> Response:
    """A script or a style; needs no token, as there is nothing of a run in it."""
    found = (await asyncio.to_thread(assets)).get(name)
    if found is None:
        raise ApiError(404, "http", "there is no such file")
    zipped = "gzip" in request.headers.get("accept-encoding", "")
    headers = {
        "Cache-Control": _FOREVER if version == assets_version() else "no-cache",
        "Vary": "Accept-Encoding",
    }
    if zipped:
        headers["Content-Encoding"] = "gzip"
    return Response(found.gzipped if zipped else found.content, media_type=found.media_type, headers=headers)


@router.get("/sign-in")
async def get_sign_in_page(request: Request, next: str = "/") -> Response:  # noqa: A002  the address' word
    """Ask for the read token."""
    return page(request, "sign_in.html", wanted=local_path(next), wrong=False)


@router.post("/sign-in")
async def post_sign_in(request: Request) -> Response:
    """Keep a token that opens the pages; refuse one that does not."""
    _refuse_other_sites(request)
    services = services_of(request)
    services.rates.take(address_of(request))
    body = await read_body(request, max_bytes=_MOST_FORM_BYTES, timeout_s=services.settings.body_timeout_s)
    form = parse_qs(body.decode("utf-8", errors="replace"))
    token = form.get("token", [""])[0].strip()
    wanted = local_path(form.get("next", ["/"])[0])
    if not await _opens(request, token):
        return page(request, "sign_in.html", status=401, wanted=wanted, wrong=True)
    answer = RedirectResponse(wanted if wanted != "/" else f"{base_of(request)}/", status_code=303)
    answer.set_cookie(
        COOKIE,
        token,
        max_age=KEPT_S,
        path=base_of(request) or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/sign-out")
async def post_sign_out(request: Request) -> Response:
    """Make the browser forget the token."""
    _refuse_other_sites(request)
    answer = RedirectResponse(f"{base_of(request)}/sign-in", status_code=303)
    answer.delete_cookie(
        COOKIE,
        path=base_of(request) or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


def _refuse_other_sites(request: Request) -> None:
    if from_another_site(request.headers):
        raise ApiError(403, "other_site", "this form was sent by a page of another site; open this one's own")


async def _opens(request: Request, token: str) -> bool:
    """Whether a token may read."""
    # Of the cookie too, SignedIn makes a header in this way.
    sent = token.encode("latin-1", errors="ignore").decode("latin-1")
    try:
        grant = await services_of(request).tokens.grant(f"Bearer {sent}")
    except NoiseScaleError:
        return False
    return grant is not None and grant.allows("read")


async def _history(services: Services, run: StoredRun) -> History:
    return History(await services.store.blocks(run.id), window_steps=services.settings.window_steps)
