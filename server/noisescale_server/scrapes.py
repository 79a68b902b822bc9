"""The page /metrics: each live run's lines, written once per version of the run."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from prometheus_client.exposition import choose_encoder

from noisescale_server.exposition import FAMILIES, lines_of, registry_of
from noisescale_server.standing import Standings, Stood
from noisescale_server.store import Store, StoredRun


@dataclass(frozen=True, slots=True)
class _Written:
    """One run at one version; without lines where it cannot be evaluated."""

    run: StoredRun
    lines: tuple[bytes, ...] | None
    error: Exception | None = None


class RunsPage:
    """Writes the page of all live runs, and remembers their lines.

    Args:
        on_failure: Told of a run that is left out because it cannot be evaluated.
    """

    def __init__(self, standings: Standings, *, on_failure: Callable[[StoredRun, Exception], None]) -> None:
        self._standings = standings
        self._on_failure = on_failure
        self._written: dict[int, _Written] = {}
        # Two scrapers at once: the second waits and finds the runs written.
        self._writing = asyncio.Lock()

    async def page(self, store: Store, *, reported_since: float, accept: str) -> tuple[bytes, str]:
        """The page and its content type.

        Args:
            store: Which runs are seen.
            reported_since: Only runs with a report since this Unix time.
            accept: The request's Accept header.
        """
        async with self._writing:
            live = await store.live(reported_since=reported_since)
            await self._write(
                {run_id: version for run_id, version in live if self._is_stale(run_id, version)}
            )
            shown = [self._written[run_id] for run_id, _ in live if run_id in self._written]
            self._forget(reported_since, most=2 * len(live))
        for written in shown:
            if written.error is not None:
                self._on_failure(written.run, written.error)
        return _assembled([written.lines for written in shown if written.lines is not None], accept=accept)

    def _is_stale(self, run_id: int, version: int) -> bool:
        written = self._written.get(run_id)
        return written is None or written.run.version < version

    async def _write(self, versions: dict[int, int]) -> None:
        async for stood in self._standings.at(versions):
            self._written[stood.run.id] = _write_one(stood)

    def _forget(self, reported_since: float, *, most: int) -> None:
        """Drop the lines of runs that are live no more, once they are many."""
        if len(self._written) > most:
            self._written = {
                run_id: written
                for run_id, written in self._written.items()
                if written.run.last_report_at >= reported_since
            }


def _write_one(stood: Stood) -> _Written:
    if isinstance(stood.standing, Exception):
        return _Written(stood.run, None, stood.standing)
    try:
        return _Written(stood.run, lines_of(stood.run, stood.standing))
    except Exception as error:  # noqa: BLE001  whatever one run's data does, the page is for the others
        return _Written(stood.run, None, error)


def _assembled(runs: list[tuple[bytes, ...]], *, accept: str) -> tuple[bytes, str]:
    encoder, content_type = choose_encoder(accept)
    empty = encoder(registry_of([]))
    body, end, _ = empty.partition(b"# EOF\n")
    heads = [b"# HELP " + head for head in body.split(b"# HELP ")[1:]]
    columns = zip(*runs, strict=True) if runs else [()] * len(FAMILIES)
    parts = chain.from_iterable((head, *column) for head, column in zip(heads, columns, strict=True))
    return b"".join([*parts, end]), content_type
