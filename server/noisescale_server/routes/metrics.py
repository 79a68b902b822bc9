"""`/metrics` for runs, the same from every replica, and `/metrics/process` for this process."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from noisescale_server.services import Reader

router = APIRouter(tags=["metrics"])

_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/metrics", response_class=Response, responses=_TEXT)
async def get_metrics(request: Request, services: Reader) -> Response:
    """The runs that reported within the grace time, in Prometheus' text or OpenMetrics format."""
    page, content_type = await services.runs_page.page(
        services.store,
        reported_since=time.time() - services.settings.grace_s,
        accept=request.headers.get("accept", ""),
    )
    return Response(page, headers={"Content-Type": content_type})


@router.get("/metrics/process", response_class=Response, responses=_TEXT)
async def get_process_metrics(request: Request, services: Reader) -> Response:
    """This server process: requests, latencies, commits, memory. Not for tokens of some runs alone."""
    services.require_all_runs()
    encoder, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(services.metrics.registry), headers={"Content-Type": content_type})
