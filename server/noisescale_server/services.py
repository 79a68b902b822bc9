"""What the endpoints work with, built once per application."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from noisescale_server.api_errors import ApiError
from noisescale_server.auth import Scope, Tokens
from noisescale_server.commits import Commits
from noisescale_server.database import Database
from noisescale_server.process_metrics import ProcessMetrics
from noisescale_server.settings import Settings
from noisescale_server.standing import Standings
from noisescale_server.store import Store


@dataclass(frozen=True, slots=True)
class Services:
    """One application's parts."""

    settings: Settings
    database: Database
    store: Store
    commits: Commits
    standings: Standings
    tokens: Tokens
    metrics: ProcessMetrics

    def require(self, scope: Scope, request: Request) -> None:
        """Let a request pass, or not.

        Raises:
            ApiError: 401: its token is missing or wrong.
        """
        if not self.tokens.allows(scope, request):
            raise ApiError(
                401,
                "unauthorized",
                f"a {scope} token is needed, as the header `Authorization: Bearer TOKEN`",
                headers={"WWW-Authenticate": 'Bearer realm="noisescale"'},
            )


def build_services(settings: Settings) -> Services:
    """Build every part; nothing is started or connected yet."""
    database = Database(settings)
    metrics = ProcessMetrics()
    store = Store(database, max_runs=settings.max_runs, window_steps=settings.window_steps)
    standings = Standings(
        store,
        window_steps=settings.window_steps,
        capacity_blocks=settings.tail_cache_blocks,
        metrics=metrics,
    )
    commits = Commits(
        store,
        queue_size=settings.ingest_queue_size,
        commit_size=settings.commit_size,
        metrics=metrics,
        after_commit=standings.after_commit,
    )
    return Services(
        settings=settings,
        database=database,
        store=store,
        commits=commits,
        standings=standings,
        tokens=Tokens(settings),
        metrics=metrics,
    )


def services_of(request: Request) -> Services:
    """The application's parts."""
    services: Services = request.app.state.services
    return services


def _reader(request: Request) -> Services:
    services = services_of(request)
    services.require("read", request)
    return services


def _writer(request: Request) -> Services:
    services = services_of(request)
    services.require("write", request)
    return services


Reader = Annotated[Services, Depends(_reader)]
"""The parts, for a request that may read."""

Writer = Annotated[Services, Depends(_writer)]
"""The parts, for a request that may write."""
