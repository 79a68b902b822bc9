"""The list of runs: found, sorted, one line each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Query
from pydantic import BaseModel

from noisescale.advice import NoiseScaleInterval
from noisescale.wire import RunSummary
from noisescale_server.services import Services
from noisescale_server.summaries import summary_of
from noisescale_server.web.sparkline import Sparkline, sparkline
from noisescale_server.web.words import ratio_of

MOST_LISTED = 200

Key = Literal["run", "state", "noise_scale", "batch", "action", "last_report"]
_STATES = {"running": 0, "stale": 1, "ended": 2}
_ACTIONS = {"lr_only": 0, "lower": 1, "raise": 2, "hold": 3}


class ListQuery(BaseModel):
    """What the address says: `q` is part of a name, `order` a direction."""

    q: Annotated[str, Query(max_length=128)] = ""
    sort: Key = "last_report"
    order: Literal["asc", "desc"] = "desc"
    state: Literal["", "running", "stale", "ended"] = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Attributes:
        scale: The noise scale that its advice goes by; None before anything was measured.
        ratio: How far the batch is from the noise scale, in words.
        fingerprint: Changes whenever anything shown of it does.
    """

    summary: RunSummary
    scale: NoiseScaleInterval | None
    ratio: str
    trend: Sparkline | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All lines, and what there is besides them.

    Attributes:
        counts: Runs of each state, whatever state was asked for.
        more: Whether there may be runs that are not listed.
    """

    query: ListQuery
    rows: list[Row]
    counts: dict[str, int]
    more: bool

    def href(self, **changes: str) -> str:
        """This list's address, with some of it changed; what is the default is left out."""
        values = self.query.model_dump() | changes
        default = ListQuery().model_dump()
        query = urlencode({name: value for name, value in values.items() if value != default[name]})
        return f"?{query}" if query else "?"

    def sort_href(self, key: Key) -> str:
        """The address that sorts by a column, or turns it round where it is sorted by already."""
        first = "asc" if key in ("run", "state", "action") else "desc"
        other = "desc" if self.query.order == "asc" else "asc"
        return self.href(sort=key, order=other if self.query.sort == key else first)


async def list_runs(services: Services, query: ListQuery) -> Listing:
    """The runs that reported last, those that match, sorted."""
    found = await services.store.runs(name_contains=query.q.strip() or None, limit=MOST_LISTED)
    rows = []
    for run, standing in await services.standings.of_all(found):
        summary = summary_of(run, standing, services)
        scale = standing.recommendation.noise_scale if standing.recommendation else None
        rows.append(
            Row(
                summary=summary,
                scale=scale,
                ratio=ratio_of(scale.value if scale else None, summary.global_batch_size),
                trend=sparkline(standing.tail, geometry=scale.geometry if scale else "euclidean"),
                fingerprint=f"{run.version}-{summary.state}",
            )
        )
    counts = {state: sum(row.summary.state == state for row in rows) for state in _STATES}
    wanted = [row for row in rows if query.state in ("", row.summary.state)]
    return Listing(query, _sorted(wanted, query), counts, more=len(found) == MOST_LISTED)


def _sorted(rows: Sequence[Row], query: ListQuery) -> list[Row]:
    """In the order asked for; runs that have no value there come last either way."""
    value = _VALUES[query.sort]
    known = [row for row in rows if value(row) is not None]
    unknown = [row for row in rows if value(row) is None]
    return sorted(known, key=value, reverse=query.order == "desc") + unknown


_VALUES: dict[Key, Callable[[Row], Any]] = {
    "run": lambda row: row.summary.run.lower(),
    "state": lambda row: _STATES[row.summary.state],
    "noise_scale": lambda row: row.scale.value if row.scale else None,
    "batch": lambda row: row.summary.global_batch_size,
    "action": lambda row: _ACTIONS.get(row.summary.action or ""),
    "last_report": lambda row: row.summary.last_report_at,
}
