"""How runs stand now: estimates and advice from each run's tail, worked out once per version.

What is remembered here is only ever a copy of what the database holds, and carries the run's version; a
request compares the two first, and reads what came since. So any number of replicas give the same answer.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from noisescale.advice import Recommendation
from noisescale.blocks import Block
from noisescale.errors import NoiseScaleError
from noisescale.estimate import Estimate, estimate_all
from noisescale.history import Phase, current_regime
from noisescale.recommend import recommend_regime
from noisescale.wire import RunInfo, RunState
from noisescale_server.errors import BadRunError
from noisescale_server.segments import decode
from noisescale_server.store import Change, Known, Store, StoredRun, tail_of

_RUNS_PER_READ = 50

_COURTESY = 2.0
_COURTESY_S = 3.0
"""While reports wait for their commit, each bit of work is followed by a pause so many times as long; not for
longer than this, since a scraper waits too."""


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
    estimates = estimate_all(regime.blocks, window_steps=window_steps, every=info.every)
    return Standing(
        tail=tuple(blocks),
        phase=regime.phase,
        learning_rate=regime.learning_rate,
        estimates=estimates,
        recommendation=recommend_regime(regime, estimates, info) if blocks else None,
    )


@dataclass(frozen=True, slots=True)
class Stood:
    """A run, and how it stands at its version.

    Attributes:
        standing: Or why it cannot be told: what the run reported cannot be evaluated.
    """

    run: StoredRun
    standing: Standing | Exception


class Standings:
    """Standings of the runs that were asked for lately.

    Args:
        window_steps: Measured steps that an estimate looks back over.
        capacity_blocks: Blocks that may be kept in memory, over all runs.
        on_failure: Told of a run that is left out because it cannot be evaluated.
        is_busy: Whether there is work that should go before this.
    """

    def __init__(
        self,
        store: Store,
        *,
        window_steps: int,
        capacity_blocks: int,
        on_failure: Callable[[StoredRun, Exception], None],
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._window_steps = window_steps
        self._capacity_blocks = capacity_blocks
        self._on_failure = on_failure
        self._is_busy = is_busy
        self._kept: OrderedDict[int, Stood] = OrderedDict()
        self._blocks = 0

    async def of(self, run: StoredRun) -> Standing:
        """One run's standing, at the version it has in the database or a later one.

        Raises:
            BadRunError: Its data cannot be evaluated.
        """
        async for stood in self.at({run.id: run.version}):
            if isinstance(stood.standing, Exception):
                self._on_failure(stood.run, stood.standing)
                raise BadRunError(run.name) from stood.standing
            return stood.standing
        raise NoiseScaleError(f"run {run.name} was removed while it was asked for")

    async def of_all(self, runs: Sequence[StoredRun]) -> list[tuple[StoredRun, Standing]]:
        """Many runs' standings, in the same order; one that cannot be evaluated is left out and told of."""
        found: dict[int, tuple[StoredRun, Standing]] = {}
        async for stood in self.at({run.id: run.version for run in runs}):
            if isinstance(stood.standing, Exception):
                self._on_failure(stood.run, stood.standing)
            else:
                found[stood.run.id] = stood.run, stood.standing
        return [found[run.id] for run in runs if run.id in found]

    async def at(self, versions: Mapping[int, int]) -> AsyncIterator[Stood]:
        """How runs stand, each at this version or a later one; in any order, and without those that are gone.

        Between any two runs other requests get their turn. A commit needs many turns of the event loop, so
        one turn each is not enough where reports come in all the time.
        """
        began = time.perf_counter()
        stale: list[int] = []
        for run_id, version in versions.items():
            kept = self._kept.get(run_id)
            if kept is not None and kept.run.version >= version:
                self._kept.move_to_end(run_id)
                yield kept
            else:
                stale.append(run_id)
        remaining = iter(stale)
        while chunk := list(islice(remaining, _RUNS_PER_READ)):
            before = {run_id: self._kept.get(run_id) for run_id in chunk}
            known = {run_id: _known(kept) for run_id, kept in before.items()}
            for change in await self._store.changes(known):
                started = time.perf_counter()
                yield self._remember(self._applied(before[change.run.id], change))
                now = time.perf_counter()
                is_courteous = self._is_busy() and now - began < _COURTESY_S
                await asyncio.sleep(_COURTESY * (now - started) if is_courteous else 0)

    def _applied(self, before: Stood | None, change: Change) -> Stood:
        try:
            tail: list[Block] = []
            if not change.whole and before is not None and isinstance(before.standing, Standing):
                tail += before.standing.tail
            for body in change.added:
                tail += map(_slim, decode(body))
            standing = standing_of(
                tail_of(tail, window_steps=self._window_steps),
                change.run.info,
                window_steps=self._window_steps,
            )
        except Exception as error:  # noqa: BLE001  whatever one run's data does, the others must be told of
            return Stood(change.run, error)
        return Stood(change.run, standing)

    def _remember(self, stood: Stood) -> Stood:
        known = self._kept.pop(stood.run.id, None)
        if known is not None:
            self._blocks -= _size(known)
            if known.run.version > stood.run.version:
                stood = known  # another request has read later
        self._kept[stood.run.id] = stood
        self._blocks += _size(stood)
        while self._blocks > self._capacity_blocks and len(self._kept) > 1:
            self._blocks -= _size(self._kept.popitem(last=False)[1])
        return stood


def _known(stood: Stood | None) -> Known | None:
    """How far a run is known; not at all where that is of no use."""
    if stood is None or not isinstance(stood.standing, Standing) or not stood.standing.tail:
        return None
    return Known(stood.run.version, stood.standing.tail[-1].last_step)


def _size(stood: Stood) -> int:
    # A run without blocks takes some room too.
    return 1 + (len(stood.standing.tail) if isinstance(stood.standing, Standing) else 0)


_SET: set[str] = set()


def _slim(block: Block) -> Block:
    """The same block in less than half the memory: without the record of which fields were given."""
    for model in (block, *block.sums):
        object.__setattr__(model, "__pydantic_fields_set__", _SET)
    return block


def state_of(run: StoredRun, *, now: float, grace_s: float) -> RunState:
    """Whether a run is going on, as far as its reports tell."""
    if run.ended:
        return "ended"
    return "running" if now - run.last_report_at <= grace_s else "stale"
