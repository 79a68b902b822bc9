"""`create_app`: one application from one set of settings. Importing this starts nothing."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi

from noisescale.advice import RecommendRequest
from noisescale.wire import BlocksReport, ErrorBody
from noisescale_server.api_errors import add_error_handlers
from noisescale_server.observe import Observe
from noisescale_server.routes import advice, docs, health, ingest, metrics, runs, tokens, web
from noisescale_server.routes.tokens import TokenRequest
from noisescale_server.services import build_services
from noisescale_server.settings import Settings
from noisescale_server.web.sign_in import SignedIn

_GUARDED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        401: "A token is needed, and there was none or a wrong one",
        403: "The token allows less than this",
        429: "Too many requests; ask again after Retry-After seconds",
        503: "The database does not answer; ask again after Retry-After seconds",
    }.items()
}
_READ_BY_ENDPOINTS = (BlocksReport, RecommendRequest, TokenRequest)
_DESCRIPTION = (
    "Keeps the gradient noise scales that training jobs report, shows them to Prometheus, and advises "
    "on batch size and learning rate, with reasons and an interval."
)

_GARBAGE_THRESHOLDS = (50_000, 20, 10)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The server as an ASGI application.

    Args:
        settings: Read from the environment if left out.
    """
    settings = settings or Settings()
    services = build_services(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await services.database.prepare()
        services.commits.start()
        services.retention.start()
        _collect_garbage_rarely()
        try:
            yield
        finally:
            await services.retention.close()
            await services.commits.close()
            await services.database.close()

    app = FastAPI(
        title="noisescale",
        description=_DESCRIPTION,
        version=version("noisescale"),
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        docs_url=None,  # FastAPI's load scripts from elsewhere; see routes.docs
        redoc_url=None,
    )
    app.state.services = services
    add_error_handlers(app)
    app.include_router(ingest.router, responses=_GUARDED)
    app.include_router(runs.router, responses=_GUARDED)
    app.include_router(advice.router, responses=_GUARDED, dependencies=[Depends(advice.check_query_names)])
    app.include_router(metrics.router, responses=_GUARDED)
    app.include_router(tokens.router, responses=_GUARDED)
    app.include_router(health.router)
    app.include_router(docs.router)
    app.include_router(web.router)
    # The last one is the outermost: Observe sees the scope that the router writes its route into.
    app.add_middleware(ingest.DirectIngest)
    app.add_middleware(Observe, metrics=services.metrics)
    app.add_middleware(SignedIn)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    return app


def _collect_garbage_rarely() -> None:
    """Keep the collector off what lives as long as the process, and from looking at each report's objects.

    Reports make many objects and next to no cycles: with Python's own thresholds a tenth of the processor
    time of ingest goes into finding none.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the schemas of the bodies that endpoints read by themselves."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            license_info=app.license_info,
            routes=app.routes,
        )
        components = document.setdefault("components", {}).setdefault("schemas", {})
        for model in _READ_BY_ENDPOINTS:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            for name, definition in schema.pop("$defs", {}).items():
                components.setdefault(name, definition)
            components[model.__name__] = schema
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"token": []}]
        app.openapi_schema = document
    return app.openapi_schema
