"""One server on SQLite and one on PostgreSQL for all tests of this folder."""

import asyncio
from collections.abc import Iterator

import pytest

from noisescale_server.database import Database
from noisescale_server.settings import Settings
from tests.services import Server, running_postgres, running_server


@pytest.fixture(scope="session")
def sqlite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on SQLite."""
    with running_server(tmp_path_factory.mktemp("sqlite")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real PostgreSQL, migrated."""
    with running_postgres() as url:
        migrate(url)
        yield url


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[Server]:
    """A server on PostgreSQL."""
    with running_server(tmp_path_factory.mktemp("postgres"), database_url=postgres_url) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of the two in turn."""
    running: Server = request.getfixturevalue(f"{request.param}_server")
    return running


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run's name that no other test has."""
    name = request.node.name
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)[:120]


def migrate(url: str) -> None:
    """What `noisescale-server migrate` does."""

    async def upgrade() -> None:
        database = Database(Settings(database_url=url))
        await database.migrate()
        await database.close()

    asyncio.run(upgrade())
