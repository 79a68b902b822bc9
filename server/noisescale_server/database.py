"""The connection to SQLite or PostgreSQL: engine, transactions, migrations."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from noisescale_server.errors import MigrationNeededError
from noisescale_server.settings import Settings

_WRITES = "noisescale_writes"
_ALONE = 0x6E6F697365  # any number that no other program takes
_MIGRATIONS = Path(__file__).parent / "migrations"


class Database:
    """An engine, with transactions that say whether they write.

    SQLite: WAL, synchronous FULL, and writers that take the write lock at once, so that none finds
    out at its first write that another one was faster.
    """

    def __init__(self, settings: Settings) -> None:
        self.is_sqlite = settings.is_sqlite
        options: dict[str, Any] = {} if self.is_sqlite else {"pool_pre_ping": True, "pool_size": 5}
        self.engine: AsyncEngine = create_async_engine(settings.database_url, **options)
        if self.is_sqlite:
            event.listen(self.engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self.engine.sync_engine, "begin", _begin_sqlite)
        self._writing = self.engine.execution_options(**{_WRITES: True})
        # SQLite's transactions see one state of the database anyway.
        self._reading = (
            self.engine
            if self.is_sqlite
            else self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        )

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that sees one state of the database."""
        async with self._reading.begin() as connection:
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed at its end, durably, or not at all."""
        async with self._writing.begin() as connection:
            yield connection

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[bool]:
        """Whether no other process does what is done under this; tells it at once, and waits for none.

        SQLite's database is one process' anyway.
        """
        if self.is_sqlite:
            yield True
            return
        async with self.engine.begin() as connection:
            # Of the transaction and not of the session, which a pooler may hand to another process.
            taken = await connection.execute(select(func.pg_try_advisory_xact_lock(_ALONE)))
            yield bool(taken.scalar_one())

    async def check(self) -> None:
        """Raise what the database driver raises where it does not answer."""
        async with self.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def check_writing(self) -> None:
        """Raise what the database driver raises where nothing can be stored, as on a full disk."""
        async with self.writing() as connection:
            # It changes nothing, and is written all the same.
            await connection.execute(text("UPDATE alembic_version SET version_num = version_num"))

    async def migrate(self) -> None:
        """Bring the tables to this version's."""
        async with self.engine.connect() as connection:
            await connection.run_sync(_upgrade)
            await connection.commit()

    async def prepare(self) -> None:
        """Make ready to serve: SQLite is migrated, PostgreSQL has to have been.

        Raises:
            MigrationNeededError: The tables are not this version's.
        """
        if self.is_sqlite:
            await self.migrate()
            return
        async with self.engine.connect() as connection:
            found = await connection.run_sync(_revision)
        expected = ScriptDirectory.from_config(_config()).get_current_head()
        if found != expected:
            raise MigrationNeededError(found=found, expected=expected)

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions are begun below, not by the driver's guess
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config


def _upgrade(connection: Connection) -> None:
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
