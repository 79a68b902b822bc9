"""A database stays small: old blocks are merged, old runs removed, and nobody who asks sees a difference."""

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import make_url

from noisescale.blocks import Block, merge_blocks
from noisescale.wire import BlocksReport
from noisescale_server.absorb import Submission
from noisescale_server.admission import RunLimits
from noisescale_server.database import Database
from noisescale_server.retention import DAY_S, Retention
from noisescale_server.settings import Settings
from noisescale_server.store import Store
from tests.server.conftest import migrate
from tests.server.reports import ATTEMPT, report, some_blocks
from tests.server.test_app import run_server_command
from tests.services import Server, running_postgres, running_server, wait_until

WINDOW = 1000
HISTORY = some_blocks(40_000)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of its own, migrated."""
    if request.param == "sqlite":
        made = f"sqlite:///{tmp_path / 'noisescale.db'}"
        migrate(made)
        yield made
        return
    with running_postgres() as made:
        migrate(made)
        yield made


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Database, Store, Retention]]:
    database = Database(Settings(database_url=url))
    try:
        store = Store(database, limits=RunLimits(max_runs=1000), window_steps=WINDOW)
        yield database, store, Retention(database, window_steps=WINDOW, retention_days=365)
    finally:
        await database.close()


def on(url: str, work: Callable[[Database, Store, Retention], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on a database."""

    async def go() -> None:
        async with opened(url) as (database, store, retention):
            await work(database, store, retention)

    asyncio.run(go())


def submissions(
    blocks: Sequence[Block], *, run: str = "job", attempt: int = ATTEMPT, per_report: int = 1, at: float = 1e9
) -> list[Submission]:
    """A report for every so many blocks."""
    return [
        Submission(run, BlocksReport(attempt=attempt, blocks=tuple(blocks[i : i + per_report])), at)
        for i in range(0, len(blocks), per_report)
    ]


async def absorb_all(store: Store, reports: Sequence[Submission]) -> None:
    for start in range(0, len(reports), 256):
        await store.absorb(reports[start : start + 256])


async def blocks_of_run(store: Store, name: str = "job") -> list[Block]:
    return await store.blocks((await store.run(name)).id)


async def merge_fully(retention: Retention) -> int:
    """Merge until there is nothing left to merge; the blocks that are gone."""
    gone = 0
    while True:
        now = sum([done.blocks_before - done.blocks_after async for done in retention.merge(at_least=0)])
        if not now:
            return gone
        gone += now


def assert_same_sums(found: Sequence[Block], wanted: Sequence[Block]) -> None:
    a, b = merge_blocks(found), merge_blocks(wanted)
    same = {"first_step", "last_step", "measured_steps", "skipped_steps", "examples"}
    assert a.model_dump(include=same) == b.model_dump(include=same)
    for one, other in zip(a.sums, b.sums, strict=True):
        assert one.key == other.key
        for name, value in other.model_dump(exclude={"group", "geometry", "steps"}).items():
            assert getattr(one, name) == pytest.approx(value, rel=1e-12), name


def test_merging_keeps_the_sums(url: str) -> None:
    """Far fewer blocks with the sums of all; two windows at the end as they came; sent again: duplicates."""

    async def work(_: Database, store: Store, retention: Retention) -> None:
        await absorb_all(store, submissions(HISTORY))
        before = await store.run("job")
        assert await merge_fully(retention) > 1000
        found = await blocks_of_run(store)
        assert len(found) < len(HISTORY) / 1.5
        assert_same_sums(found, HISTORY)
        young = 2 * WINDOW // 10
        assert found[-young:] == HISTORY[-young:]
        after = await store.run("job")
        assert (after.steps, after.measured_steps, after.examples, after.last_step) == (
            *(before.steps, before.measured_steps, before.examples, before.last_step),
        )
        assert after.pending_blocks == 0
        again = await store.absorb(submissions(HISTORY[:300], per_report=300))
        assert (again[0].accepted, again[0].duplicates) == (0, 300)  # type: ignore[union-attr]  # no error
        assert await blocks_of_run(store) == found

    on(url, work)


def test_a_million_steps_are_few_rows(tmp_path: Path) -> None:
    """Fewer than 5,000 rows at every moment, and no more statements a pass the older the run is."""
    url = f"sqlite:///{tmp_path / 'noisescale.db'}"
    migrate(url)
    blocks = some_blocks(200_000)
    # As of a job that measures every fifth step.
    spread = [
        b.model_copy(update={"first_step": 5 * b.first_step, "last_step": 5 * b.last_step + 4})
        for b in blocks
    ]

    async def work(database: Database, store: Store, retention: Retention) -> None:
        statements = 0

        def count(*_: object) -> None:
            nonlocal statements
            statements += 1

        event.listen(database.engine.sync_engine, "before_cursor_execute", count)
        most, passes = 0, []
        for start in range(0, len(spread), 512):
            await absorb_all(store, submissions(spread[start : start + 512]))
            most = max(most, await store.count_segments(1))
            statements = 0
            async for _ in retention.merge():
                pass
            passes.append(statements)
        run = await store.run("job")
        assert run.steps == 1_000_000
        assert run.measured_steps == 200_000
        assert most < 5000
        assert max(passes[-10:]) < 2 * max(passes[5:15])
        assert_same_sums(await store.blocks(run.id), spread)

    on(url, work)


def test_a_restart_into_merged_blocks(url: str) -> None:
    """A merged block that reaches into repeated steps goes as a whole; what counts never overlaps."""

    async def work(_: Database, store: Store, retention: Retention) -> None:
        await absorb_all(store, submissions(HISTORY))
        await merge_fully(retention)
        merged = max((await blocks_of_run(store))[20:], key=lambda block: block.measured_steps)
        assert merged.measured_steps >= 20
        start = merged.first_step + 10
        later = some_blocks(500, seed=3, first_step=start)
        await absorb_all(store, submissions(later, attempt=ATTEMPT + 1))
        found = await blocks_of_run(store)
        assert found[-len(later) :] == later
        assert found[-len(later) - 1].last_step < start
        run = await store.run("job")
        assert run.measured_steps == sum(block.measured_steps for block in found)
        lost = start + 500 - run.measured_steps
        assert 0 < lost <= merged.measured_steps
        # What is superseded is kept as ranges of steps, so that it is known when it is sent again.
        rows = await store.count_segments(run.id)
        await merge_fully(retention)
        assert await store.count_segments(run.id) < rows
        again = await store.absorb(submissions(HISTORY[-500:], per_report=500))
        assert again[0].accepted == 0  # type: ignore[union-attr]  # no error
        assert await blocks_of_run(store) == found

    on(url, work)


def test_two_at_once_and_reports_meanwhile(url: str) -> None:
    """Two processes merge while a third one stores: each block counts once."""

    async def go() -> None:
        async with opened(url) as (_, store, first), opened(url) as (_, _, second):
            await absorb_all(store, submissions(HISTORY[:3000]))
            await asyncio.gather(
                merge_fully(first),
                merge_fully(second),
                absorb_all(store, submissions(HISTORY[3000:3600])),
            )
            await merge_fully(first)
            found = await blocks_of_run(store)
            assert len(found) < 3000
            assert_same_sums(found, HISTORY[:3600])

    asyncio.run(go())


def test_only_one_process_at_a_time(postgres_url: str) -> None:
    """The background's turn is one process'; the other is told so at once."""

    async def go() -> None:
        async with opened(postgres_url) as (first, _, _), opened(postgres_url) as (second, _, _):
            async with first.alone() as has, second.alone() as has_not:
                assert (has, has_not) == (True, False)
            async with second.alone() as has:
                assert has

    asyncio.run(go())


def test_purging_spares_who_reports(url: str) -> None:
    """Runs without a report for long go, the oldest first; one that reports in between stays."""

    async def go() -> None:
        async with opened(url) as (database, store, retention):
            now = time.time()
            for name, age in (("older", 20), ("old", 10), ("new", 0)):
                blocks = HISTORY[:5]
                await store.absorb(submissions(blocks, run=name, per_report=5, at=now - age * DAY_S))
            assert [name for _, name in await retention.outdated(days=5)] == ["older", "old"]
            assert [name for _, name in await retention.outdated(days=15)] == ["older"]

            async for removed in retention.purge(days=5):
                assert (removed.run, removed.segments) == ("older", 1)
                await store.absorb(submissions(HISTORY[5:10], run="old", per_report=5, at=now))
            assert {run.name for run in await store.runs()} == {"old", "new"}
            assert_same_sums(await blocks_of_run(store, "old"), HISTORY[:10])
            async with database.reading() as connection:
                for table in ("segments", "attempts"):
                    left = f"SELECT count(*) FROM {table} WHERE run_id NOT IN (SELECT id FROM runs)"  # noqa: S608  fixed
                    assert (await connection.execute(text(left))).scalar_one() == 0

    asyncio.run(go())


def test_the_tables_before_merging_are_brought_along(tmp_path: Path) -> None:
    """A database of the schema before keeps its blocks, and they count as not looked at."""
    url = f"sqlite:///{tmp_path / 'noisescale.db'}"
    migrate(url)
    on(url, lambda _, store, __: absorb_all(store, submissions(HISTORY[:50])))
    engine = create_engine(make_url(url).set(drivername="sqlite"))
    with engine.begin() as connection:
        for statement in (
            "ALTER TABLE runs DROP COLUMN pending_blocks",
            "ALTER TABLE segments DROP COLUMN level",
            "ALTER TABLE runs ADD COLUMN merged_until BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE runs ADD COLUMN merged_measured_steps BIGINT NOT NULL DEFAULT 0",
            "UPDATE alembic_version SET version_num = '0003'",
        ):
            connection.execute(text(statement))
    engine.dispose()
    migrate(url)

    async def work(_: Database, store: Store, __: Retention) -> None:
        assert await blocks_of_run(store) == HISTORY[:50]
        assert (await store.run("job")).pending_blocks == 50

    on(url, work)


# Commands, on the database of a server that goes on


@pytest.fixture
def busy_server(url: str, tmp_path: Path) -> Iterator[Server]:
    """A server with one long run."""
    with running_server(tmp_path / "server", database_url=url) as server:
        for start in range(0, 2000, 20):
            body = report(HISTORY[start : start + 20], run={"max_micro_batch_size": 64})
            assert server.post("/v1/runs/job/blocks", body).status == 200
        yield server


def command(server: Server, *arguments: str) -> str:
    """What `noisescale-server` prints, on the server's database."""
    done = run_server_command(
        *arguments, NOISESCALE_DATABASE_URL=server.environment["NOISESCALE_DATABASE_URL"]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nobody_sees_that_blocks_were_merged(busy_server: Server) -> None:
    """/metrics and the advice are the same to the last byte, before and after, and after a restart."""
    paths = ("/metrics", "/v1/runs/job", "/recommend?run=job")

    def pages() -> list[bytes]:
        return [busy_server.get(path).body for path in paths]

    before = pages()
    series = busy_server.get("/v1/runs/job/series?max_points=50").json()["points"]
    assert "old blocks are" in command(busy_server, "prune")
    assert pages() == before
    busy_server.kill()
    busy_server.start_again()
    assert pages() == before
    assert len(busy_server.get("/v1/runs/job/series?max_points=50").json()["points"]) >= len(series) / 2


def test_prune_while_reports_come(busy_server: Server) -> None:
    """Removing one run and merging another while both sides write: nothing of the others is lost."""
    assert busy_server.post("/v1/runs/gone/blocks", report(HISTORY[:5])).status == 200
    assert command(busy_server, "prune", "--dry-run", "--run", "gone", "--older-than", "0") == (
        "gone\nwould remove 1 run\n"
    )
    assert busy_server.get("/v1/runs/gone").status == 200
    answers: list[int] = []
    stopping = threading.Event()

    def sender() -> None:
        for start in range(2000, len(HISTORY), 5):
            if stopping.is_set():
                return
            body = report(HISTORY[start : start + 5], run={"max_micro_batch_size": 64})
            answers.append(busy_server.post("/v1/runs/job/blocks", body).status)

    thread = threading.Thread(target=sender)
    thread.start()
    try:
        printed = command(busy_server, "prune", "--run", "gone", "--older-than", "0")
        assert printed.startswith("gone: removed, 1 row\n")
        command(busy_server, "prune")
    finally:
        stopping.set()
        thread.join(60)
    assert answers
    assert set(answers) == {200}
    assert busy_server.get("/v1/runs/gone").status == 404
    found = busy_server.get("/v1/runs/job").json()
    assert found["measured_steps"] == 20_000 + 50 * len(answers)
    counted = json.loads(command(busy_server, "stats", "--json"))
    assert (counted["runs"], counted["measured_steps"]) == (1, found["measured_steps"])
    assert counted["merged_rows"] > 0
    assert counted["size_bytes"] > 10_000
    assert "merged" in command(busy_server, "stats")


def test_a_removed_runs_number_is_given_again(busy_server: Server) -> None:
    """/metrics shows a new run as itself, although SQLite gives it the number of one that was removed."""
    assert busy_server.post("/v1/runs/first/blocks", report(HISTORY[:60])).status == 200
    assert 'run_id="first"' in busy_server.get("/metrics").text
    command(busy_server, "prune", "--run", "first", "--older-than", "0")
    other = some_blocks(300, seed=8)
    assert busy_server.post("/v1/runs/second/blocks", report(other)).status == 200
    live = busy_server.get("/metrics").text
    assert 'run_id="first"' not in live
    assert 'run_id="second"' in live
    busy_server.kill()
    busy_server.start_again()
    assert busy_server.get("/metrics").text == live


def test_ended_and_silent_runs_leave_metrics(tmp_path: Path) -> None:
    """After the grace time they are on /metrics no more, and can be asked for still."""
    with running_server(tmp_path, grace_s=2) as server:
        server.post("/v1/runs/ended/blocks", report(HISTORY[:60], ended=True))
        server.post("/v1/runs/silent/blocks", report(HISTORY[:60]))
        assert 'run_id="ended"' in server.get("/metrics").text
        wait_until(lambda: "run_id=" not in server.get("/metrics").text, what="the end of the grace time")
        states = {run["run"]: run["state"] for run in server.get("/v1/runs").json()["runs"]}
        assert states == {"ended": "ended", "silent": "stale"}
        assert server.get("/recommend?run=ended").status == 200


def test_a_backup_is_a_database(tmp_path: Path) -> None:
    """Copied while reports come, as of one moment; a server starts on the copy and knows the runs."""
    with running_server(tmp_path) as server:
        stopping = threading.Event()

        def sender() -> None:
            for index, block in enumerate(HISTORY):
                if stopping.is_set():
                    return
                server.post("/v1/runs/job/blocks", report([block], seq=index))

        thread = threading.Thread(target=sender)
        thread.start()
        try:
            wait_until(lambda: server.get("/v1/runs/job").status == 200, what="the first report")
            least = server.get("/v1/runs/job").json()["measured_steps"]
            copy = tmp_path / "copy.db"
            assert "checked" in command(server, "backup", str(copy))
            most = server.get("/v1/runs/job").json()["measured_steps"]
        finally:
            stopping.set()
            thread.join(60)
        with running_server(tmp_path / "restored", database_url=f"sqlite:///{copy}") as restored:
            assert least <= restored.get("/v1/runs/job").json()["measured_steps"] <= most
        twice = run_server_command("backup", str(copy), NOISESCALE_DATABASE_URL=f"sqlite:///{copy}")
        assert twice.returncode != 0
        assert "is there already" in twice.stderr
    assert sqlite3.connect(copy).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_commands_say_what_is_wrong(tmp_path: Path) -> None:
    """In a line each: no database, a way that does not fit, a number that is none; no password shown."""
    missing = f"sqlite:///{tmp_path / 'none' / 'x.db'}"
    postgres = "postgresql://user:very-secret@127.0.0.1:1/noisescale"
    for arguments, url, wanted in (
        (("backup", "b.db"), missing, "there is no database at"),
        (("backup", "b.db"), postgres, "pg_dump --format=custom --file=b.db"),
        (("prune", "--older-than", "-1"), missing, "a number of days, 0 or more, got -1.0"),
        (("stats",), missing, "the database cannot be reached"),
        (("prune",), postgres, "the database cannot be reached"),
    ):
        done = run_server_command(*arguments, NOISESCALE_DATABASE_URL=url)
        assert done.returncode != 0, arguments
        shown = " ".join(done.stderr.split())
        assert wanted in shown, shown
        assert "very-secret" not in shown
        assert "Traceback" not in shown
