"""How runs stand now: estimates and advice from each run's tail, worked out once per version.

What is remembered here is only ever a copy of what the database holds, and carries the run's
version; a request compares the two first. So any number of replicas give the same answer.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from noisescale.advice import Recommendation
from noisescale.blocks import TOTAL, Block, Geometry, main_geometry
from noisescale.errors import NoiseScaleError
from noisescale.estimate import Estimate, estimate, window
from noisescale.history import Phase, current_regime
from noisescale.recommend import recommend_run
from noisescale.wire import RunInfo, RunState
from noisescale_server.absorb import Absorbed
from noisescale_server.process_metrics import ProcessMetrics
from noisescale_server.store import Store, StoredRun

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """A run as its last blocks show it.

    Attributes:
        tail: Its last blocks, enough for one window.
        phase, learning_rate: Of the current regime.
        estimates: Of the current regime, one per layer group and geometry; the total first, in the
            Euclidean geometry or what was measured instead. Empty before the first block.
        recommendation: None before the first block.
    """

    tail: tuple[Block, ...]
    phase: Phase
    learning_rate: float | None
    estimates: tuple[Estimate, ...]
    recommendation: Recommendation | None

    @property
    def total(self) -> Estimate | None:
        """The whole model's estimate, Euclidean or what was measured instead."""
        return self.estimates[0] if self.estimates else None

    @property
    def global_batch_size(self) -> float | None:
        """Of the last block."""
        return self.tail[-1].global_batch_size if self.tail else None


def standing_of(blocks: Sequence[Block], info: RunInfo, *, window_steps: int) -> Standing:
    """Work out how a run stands.

    Args:
        blocks: Its last ones, in step order.
        info: What it reported of itself.
        window_steps: Measured steps that an estimate looks back over.
    """
    regime = current_regime(blocks)
    main = main_geometry(regime.blocks)
    keys: dict[tuple[str, Geometry], None] = {(TOTAL, main): None} if regime.blocks else {}
    for block in regime.blocks:
        keys |= dict.fromkeys((sums.group, sums.geometry) for sums in block.sums)
    estimates = tuple(
        estimate(regime.blocks, group=group, geometry=geometry, window_steps=window_steps, every=info.every)
        for group, geometry in keys
    )
    return Standing(
        tail=tuple(blocks),
        phase=regime.phase,
        learning_rate=regime.learning_rate,
        estimates=estimates,
        recommendation=recommend_run(blocks, info, window_steps=window_steps) if blocks else None,
    )


@dataclass(slots=True)
class _Remembered:
    version: int
    tail: list[Block]
    standing: Standing | None


class Standings:
    """Standings of the runs that were asked for or reported on lately.

    Args:
        window_steps: Measured steps that an estimate looks back over.
        capacity_blocks: Blocks that may be kept in memory, over all runs.
    """

    def __init__(
        self, store: Store, *, window_steps: int, capacity_blocks: int, metrics: ProcessMetrics
    ) -> None:
        self._store = store
        self._window_steps = window_steps
        self._capacity_blocks = capacity_blocks
        self._metrics = metrics
        self._remembered: OrderedDict[int, _Remembered] = OrderedDict()
        self._blocks = 0

    def after_commit(self, results: Sequence[Absorbed]) -> None:
        """Keep what is remembered in step with what was just stored."""
        for result in results:
            kept = self._remembered.get(result.run_id)
            if kept is None:
                continue
            if result.appended is None or result.version != kept.version + 1:
                self._forget(result.run_id)
                continue
            tail = [*kept.tail, *result.appended]
            self._remember(result.run_id, result.version, list(window(tail, window_steps=self._window_steps)))

    async def of(self, run: StoredRun) -> Standing:
        """One run's standing, at the version it has in the database.

        Raises:
            NoiseScaleError: Its data cannot be evaluated.
        """
        kept = self._remembered.get(run.id)
        if kept is None or kept.version < run.version:
            version, tail = await self._store.tail(run.id)
            kept = self._remember(run.id, version, tail)
        self._remembered.move_to_end(run.id)
        if kept.standing is None:
            kept.standing = standing_of(kept.tail, run.info, window_steps=self._window_steps)
        return kept.standing

    async def of_all(self, runs: Sequence[StoredRun]) -> list[tuple[StoredRun, Standing]]:
        """Many runs' standings; one that cannot be evaluated is left out, counted and logged."""
        found: list[tuple[StoredRun, Standing]] = []
        began = time.monotonic()
        for run in runs:
            try:
                found.append((run, await self.of(run)))
            except (NoiseScaleError, ArithmeticError, ValueError) as error:
                # One run's bad data must not take the others off the page.
                self._metrics.bad_runs.inc()
                _log.error("run left out", run=run.name, error=f"{type(error).__name__}: {error}"[:500])
            if time.monotonic() - began > 0.02:  # let waiting requests in between
                await asyncio.sleep(0)
                began = time.monotonic()
        return found

    def _remember(self, run_id: int, version: int, tail: list[Block]) -> _Remembered:
        self._forget(run_id)
        kept = self._remembered[run_id] = _Remembered(version, tail, None)
        self._blocks += len(tail)
        while self._blocks > self._capacity_blocks and len(self._remembered) > 1:
            self._forget(next(iter(self._remembered)))
        return kept

    def _forget(self, run_id: int) -> None:
        kept = self._remembered.pop(run_id, None)
        if kept is not None:
            self._blocks -= len(kept.tail)


def state_of(run: StoredRun, *, now: float, grace_s: float) -> RunState:
    """Whether a run is going on, as far as its reports tell."""
    if run.ended:
        return "ended"
    return "running" if now - run.last_report_at <= grace_s else "stale"
