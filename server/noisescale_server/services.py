"""What the endpoints work with, built once per application."""

from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Request

from noisescale_server.admission import RunLimits
from noisescale_server.api_errors import ApiError
from noisescale_server.auth import EVERYBODY, Grant, Tokens
from noisescale_server.bad_runs import BadRuns
from noisescale_server.commits import Commits
from noisescale_server.database import Database
from noisescale_server.limits import RequestRates
from noisescale_server.process_metrics import ProcessMetrics
from noisescale_server.retention import Retention
from noisescale_server.scrapes import RunsPage
from noisescale_server.settings import Settings
from noisescale_server.standing import Standings
from noisescale_server.store import Store
from noisescale_server.tokens import Scope, TokenTable


@dataclass(frozen=True, slots=True)
class Services:
    """One application's parts; for one request, as far as its token lets it see.

    Attributes:
        grant: What the request's token allows.
    """

    settings: Settings
    database: Database
    store: Store
    commits: Commits
    retention: Retention
    standings: Standings
    runs_page: RunsPage
    tokens: Tokens
    token_table: TokenTable
    rates: RequestRates
    metrics: ProcessMetrics
    grant: Grant = EVERYBODY

    async def require(self, scope: Scope, request: Request) -> "Services":
        """Let a request pass, or not; the parts as it may see them.

        Raises:
            ApiError: 401: its token is missing or wrong. 403: it allows less. 429: it came too often.
        """
        grant = await self.tokens.grant(request.headers.get("authorization"))
        self.rates.take(address_of(request) if grant is None or grant.id is None else grant.id)
        if grant is None or (grant.id is None and not grant.allows(scope)):
            raise ApiError(
                401,
                "unauthorized",
                f"{_a(scope)} token is needed, as the header `Authorization: Bearer TOKEN`",
                headers={"WWW-Authenticate": 'Bearer realm="noisescale"'},
            )
        if not grant.allows(scope):
            raise ApiError(
                403,
                "forbidden",
                f"this needs {_a(scope)} token, and the one that was sent is {_a(grant.scope)} token",
            )
        if not grant.prefix:
            return replace(self, grant=grant)
        return replace(self, grant=grant, store=self.store.limited_to(grant.prefix))

    def require_run(self, run: str) -> None:
        """Let a request write to a run, or not.

        Raises:
            ApiError: 403: its token is for other runs.
        """
        if not self.grant.covers(run):
            raise ApiError(
                403,
                "forbidden",
                f"this token may write only runs whose names start with {self.grant.prefix!r}",
                fields=["run"],
            )

    def require_all_runs(self) -> None:
        """Let a request see what is of all runs together, or not.

        Raises:
            ApiError: 403: its token is for some runs.
        """
        if self.grant.prefix:
            raise ApiError(
                403,
                "forbidden",
                f"this is of all runs, and the token is for those whose names start with "
                f"{self.grant.prefix!r} alone",
            )


def build_services(settings: Settings) -> Services:
    """Build every part; nothing is started or connected yet."""
    database = Database(settings)
    metrics = ProcessMetrics()
    bad_runs = BadRuns(metrics)
    limits = RunLimits(
        max_runs=settings.max_runs,
        max_runs_per_token=settings.max_runs_per_token,
        max_groups=settings.max_groups,
    )
    store = Store(database, limits=limits, window_steps=settings.window_steps)
    commits = Commits(
        store,
        queue_size=settings.ingest_queue_size,
        commit_size=settings.commit_size,
        metrics=metrics,
    )
    retention = Retention(
        database,
        window_steps=settings.window_steps,
        retention_days=settings.retention_days,
        metrics=metrics,
        is_busy=lambda: commits.is_busy,
    )
    standings = Standings(
        store,
        window_steps=settings.window_steps,
        capacity_blocks=settings.tail_cache_blocks,
        on_failure=bad_runs.tell,
        is_busy=lambda: commits.is_busy,
    )
    token_table = TokenTable(database)
    return Services(
        settings=settings,
        database=database,
        store=store,
        commits=commits,
        retention=retention,
        standings=standings,
        runs_page=RunsPage(standings, on_failure=bad_runs.tell),
        tokens=Tokens(settings, token_table),
        token_table=token_table,
        rates=RequestRates(per_s=settings.max_requests_per_s),
        metrics=metrics,
    )


def services_of(request: Request) -> Services:
    """The application's parts."""
    services: Services = request.app.state.services
    return services


def _a(scope: Scope) -> str:
    return f"an {scope}" if scope == "admin" else f"a {scope}"


def address_of(request: Request) -> str:
    """Where a request comes from, as far as a proxy that is trusted says."""
    return request.client.host if request.client is not None else ""


async def _reader(request: Request) -> Services:
    return await services_of(request).require("read", request)


async def _writer(request: Request) -> Services:
    return await services_of(request).require("write", request)


async def _admin(request: Request) -> Services:
    return await services_of(request).require("admin", request)


Reader = Annotated[Services, Depends(_reader)]
"""The parts, for a request that may read."""

Writer = Annotated[Services, Depends(_writer)]
"""The parts, for a request that may write."""

Admin = Annotated[Services, Depends(_admin)]
"""The parts, for a request that may do everything."""
