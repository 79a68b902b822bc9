"""`/metrics` for runs, the same from every replica, and `/metrics/process` for this process."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from noisescale_server.exposition import registry_of
from noisescale_server.services import Reader

router = APIRouter(tags=["metrics"])

_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/metrics", response_class=Response, responses=_TEXT)
async def get_metrics(request: Request, services: Reader) -> Response:
    """The runs that reported within the grace time, in Prometheus' text or OpenMetrics format."""
    since = time.time() - services.settings.grace_s
    live = await services.store.runs(reported_since=since)
    standings = await services.standings.of_all(sorted(live, key=lambda run: run.name))
    return _page(request, registry_of(standings))


@router.get("/metrics/process", response_class=Response, responses=_TEXT)
async def get_process_metrics(request: Request, services: Reader) -> Response:
    """This server process: requests, latencies, commits, memory."""
    return _page(request, services.metrics.registry)


def _page(request: Request, registry: CollectorRegistry) -> Response:
    encoder, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(registry), headers={"Content-Type": content_type})
