"""However reports are cut, repeated and ordered, the store ends up with the same run."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noisescale.blocks import Block
from noisescale.wire import BlocksReport
from noisescale_server.absorb import Submission
from noisescale_server.admission import RunLimits
from noisescale_server.database import Database
from noisescale_server.settings import Settings
from noisescale_server.store import Store, StoredRun
from tests.server.reports import ATTEMPT, some_blocks

BLOCKS = some_blocks(120)


async def absorbed(commits: list[list[Submission]]) -> tuple[StoredRun, list[Block]]:
    """The run "job" after these commits, in a database of its own."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Settings(database_url=f"sqlite:///{Path(folder) / 'x.db'}"))
        try:
            await database.migrate()
            store = Store(database, limits=RunLimits(max_runs=10), window_steps=1000)
            for submissions in commits:
                await store.absorb(submissions)
            run = await store.run("job")
            return run, await store.blocks(run.id)
        finally:
            await database.close()


def submission(blocks: list[Block], *, attempt: int = ATTEMPT) -> Submission:
    report = BlocksReport(attempt=attempt, blocks=tuple(sorted(blocks, key=lambda b: b.first_step)))
    return Submission("job", report, received_at=1000.0)


@st.composite
def deliveries(draw: st.DrawFn) -> list[list[Submission]]:
    """All blocks, cut into reports, some sent twice, in any order, several to a commit."""
    owners = draw(st.lists(st.integers(0, 4), min_size=len(BLOCKS), max_size=len(BLOCKS)))
    parts = [[b for b, owner in zip(BLOCKS, owners, strict=True) if owner == one] for one in range(5)]
    reports = [submission(part) for part in parts if part]
    again = draw(st.lists(st.sampled_from(reports), max_size=3))
    order = draw(st.permutations([*reports, *again]))
    cut = draw(st.integers(1, len(order)))
    return [list(order[:cut]), list(order[cut:])]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deliveries())
def test_any_delivery_gives_the_same_run(commits: list[list[Submission]]) -> None:
    """Cut, repeated, shuffled, alone or several in a commit: the same blocks and the same counts."""
    run, blocks = asyncio.run(absorbed(commits))
    assert blocks == BLOCKS
    assert (run.steps, run.measured_steps, run.last_step) == (120, 120, 119)
    assert run.examples == sum(block.examples for block in BLOCKS)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(restart=st.integers(0, 11), order=st.permutations([0, 1, 2]))
def test_any_order_of_attempts_gives_the_same_run(restart: int, order: list[int]) -> None:
    """A second attempt that begins at any block: what it repeats counts once, whoever comes first."""
    later = some_blocks(120 - 10 * restart, seed=9, first_step=10 * restart)
    reports = [submission(BLOCKS[:6]), submission(BLOCKS[6:]), submission(later, attempt=ATTEMPT + 1)]
    run, blocks = asyncio.run(absorbed([[reports[index]] for index in order]))
    assert blocks == [*BLOCKS[:restart], *later]
    assert (run.steps, run.measured_steps) == (120, 120)
