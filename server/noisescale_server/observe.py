"""Middleware: a request id in every log and answer, every request measured, and no error left to others."""

import time
import uuid
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noisescale_server.api_errors import internal_error
from noisescale_server.process_metrics import ProcessMetrics
from noisescale_server.security_headers import secured

_log = structlog.get_logger(__name__)


class Observe:
    """Wraps an application; plain ASGI, since it is on the path of every report."""

    def __init__(self, app: ASGIApp, *, metrics: ProcessMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and see what comes back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex[:16]
        status: int | None = None
        started = time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = secured(message.get("headers", ()), scheme=scope["scheme"])
                headers.append((b"x-request-id", request_id.encode()))
                message = {**message, "headers": headers}
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, sending)
            except Exception as error:
                _log.exception("request failed", route=_route(scope), exc_info=error)
                if status is not None:
                    raise  # half an answer is out; only cutting the connection tells that it is not whole
                await internal_error()(scope, receive, sending)
            finally:
                route = _route(scope)
                self._metrics.requests.labels(_method(scope["method"]), route, str(status or 500)).inc()
                self._metrics.request_seconds.labels(route).observe(time.perf_counter() - started)


def _route(scope: Scope) -> str:
    """The endpoint's pattern, never the path: a label must not grow with what is asked for."""
    route: Any = scope.get("route")
    return str(getattr(route, "path", "none"))


def _method(method: str) -> str:
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
