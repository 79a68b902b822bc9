"""The application as a whole: its description of itself, its start, its health, its tables."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import make_url

from noisescale_server.app import create_app
from noisescale_server.database import Database
from noisescale_server.schema import metadata
from noisescale_server.settings import Settings
from tests.server.reports import report, some_blocks
from tests.services import Server, free_port, http, running_postgres, running_server, wait_until

ROUTES = {
    ("POST", "/v1/runs/{run}/blocks"),
    ("GET", "/v1/runs"),
    ("GET", "/v1/runs/{run}"),
    ("GET", "/v1/runs/{run}/series"),
    ("GET", "/recommend"),
    ("POST", "/recommend"),
    ("GET", "/metrics"),
    ("GET", "/metrics/process"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
}


def run_server_command(*arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """`noisescale-server` to its end."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NOISESCALE_")}
    return subprocess.run(
        [sys.executable, "-m", "noisescale_server", *arguments],
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_openapi_names_every_route_with_examples(sqlite_server: Server, run: str) -> None:
    """/openapi.json lists the wire's routes; its examples are requests that work."""
    document = sqlite_server.get("/openapi.json").json()
    found = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert found >= ROUTES
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation.get("description"), (method, path)
    ingest = document["paths"]["/v1/runs/{run}/blocks"]["post"]["requestBody"]["content"]
    example = ingest["application/json"]["example"]
    assert sqlite_server.post(f"/v1/runs/{run}/blocks", example).status == 200
    advice = document["paths"]["/recommend"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert sqlite_server.post("/recommend", advice).json()["action"] == "raise"
    assert sqlite_server.get("/docs").status == 200


def references(node: Any) -> list[str]:
    """Every $ref in a document."""
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    if isinstance(node, list):
        return [found for value in node for found in references(value)]
    return []


def test_openapi_refers_to_nothing_missing(sqlite_server: Server) -> None:
    """Every $ref leads somewhere."""
    document = sqlite_server.get("/openapi.json").json()
    for reference in references(document):
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_unknown_addresses_and_methods(sqlite_server: Server) -> None:
    """404 and 405 are errors of the same shape as all."""
    for method, path, status in [("GET", "/nothing", 404), ("DELETE", "/v1/runs", 405)]:
        answer = http(method, sqlite_server.url + path)
        assert answer.status == status
        assert answer.json()["error"]["message"]


def test_health(sqlite_server: Server) -> None:
    """Alive and ready."""
    assert sqlite_server.get("/healthz").json() == {"status": "ok"}
    assert sqlite_server.get("/readyz").json() == {"status": "ok"}


def test_readiness_tells_of_a_lost_database(tmp_path: Path) -> None:
    """With PostgreSQL gone /readyz and ingest are 503 with Retry-After, /healthz is 200, nothing dies."""
    with running_postgres() as url:
        run_migrate(url)
        with running_server(tmp_path, database_url=url) as server:
            assert server.post("/v1/runs/a/blocks", report(some_blocks(10))).status == 200
            # Ends every connection from outside and lets no new one in.
            forbid_connections(url)
            assert server.get("/readyz").status == 503
            assert server.get("/healthz").status == 200
            refused = server.post("/v1/runs/a/blocks", report(some_blocks(20)))
            assert refused.status == 503
            assert int({k.lower(): v for k, v in refused.headers.items()}["retry-after"]) > 0
            allow_connections(url)
            wait_until(lambda: server.get("/readyz").status == 200, what="the database's return")
            accepted = server.post("/v1/runs/a/blocks", report(some_blocks(20))).json()
            assert accepted == {"accepted": 1, "duplicates": 1, "last_step": 19}


def run_migrate(url: str) -> None:
    done = run_server_command("migrate", NOISESCALE_DATABASE_URL=url)
    assert done.returncode == 0, done.stderr


def _administer(url: str, *statements: str) -> None:
    import asyncio

    import asyncpg

    async def run() -> None:
        other = make_url(url).set(database="template1")
        connection = await asyncpg.connect(other.render_as_string(hide_password=False))
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    asyncio.run(run())


def _database(url: str) -> str:
    return str(make_url(url).database)


def forbid_connections(url: str) -> None:
    name = _database(url)
    _administer(
        url,
        f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false',
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",  # noqa: S608  our own name
    )


def allow_connections(url: str) -> None:
    _administer(url, f'ALTER DATABASE "{_database(url)}" ALLOW_CONNECTIONS true')


def test_tables_have_to_be_migrated(tmp_path: Path) -> None:
    """On PostgreSQL the server does not start on another version's tables, and says what to run."""
    with running_postgres() as url:
        done = run_server_command("serve", "--port", str(free_port()), NOISESCALE_DATABASE_URL=url)
        assert done.returncode != 0
        assert "noisescale-server migrate" in done.stderr + done.stdout
        run_migrate(url)
        run_migrate(url)  # again does nothing
        with running_server(tmp_path, database_url=url) as server:
            assert server.get("/v1/runs").json() == {"runs": []}


def test_nothing_else_migrates() -> None:
    """Building the application starts and connects nothing."""
    create_app(Settings(database_url="postgresql://nobody@127.0.0.1:9/none"))


def test_migrations_make_the_schema(tmp_path: Path) -> None:
    """What the migrations make is what schema.py says: tables, columns, keys, indexes."""
    migrated, made = tmp_path / "migrated.db", tmp_path / "made.db"
    done = run_server_command("migrate", NOISESCALE_DATABASE_URL=f"sqlite:///{migrated}")
    assert done.returncode == 0, done.stderr
    engine = create_engine(f"sqlite:///{made}")
    metadata.create_all(engine)
    found = inspect(create_engine(f"sqlite:///{migrated}"))
    wanted = inspect(engine)
    names = set(found.get_table_names()) - {"alembic_version"}
    assert names == set(wanted.get_table_names())
    for name in names:
        described = [
            [(c["name"], str(c["type"]), c["nullable"]) for c in one.get_columns(name)]
            for one in (found, wanted)
        ]
        assert described[0] == described[1]
        assert found.get_pk_constraint(name) == wanted.get_pk_constraint(name)
        assert found.get_indexes(name) == wanted.get_indexes(name)
        assert found.get_foreign_keys(name) == wanted.get_foreign_keys(name)
        assert found.get_unique_constraints(name) == wanted.get_unique_constraints(name)


def test_every_setting_is_described() -> None:
    """Each has words for people, and a default that passes its own check."""
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.rstrip().endswith("."), name
    Settings()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"NOISESCALE_DATABASE_URL": "mysql://x"}, "sqlite:///PATH"),
        ({"NOISESCALE_GRACE_S": "soon"}, "NOISESCALE_GRACE_S"),
        ({"NOISESCALE_LOG_LEVEL": "loud"}, "log_level is debug"),
        ({"NOISESCALE_READ_TOKENS_FILE": "/nowhere/token"}, "cannot be read"),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, str], words: str) -> None:
    """One line that names the variable and what it may be; no traceback, no secret."""
    done = run_server_command("serve", "--port", str(free_port()), **settings)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104  that is what is refused
def test_beyond_loopback_needs_tokens(host: str, tmp_path: Path) -> None:
    """Listening to other machines without a write token does not start."""
    done = run_server_command(
        "serve",
        "--host",
        host,
        "--port",
        str(free_port()),
        NOISESCALE_DATABASE_URL=f"sqlite:///{tmp_path}/x.db",
    )
    assert done.returncode == 1
    assert "NOISESCALE_WRITE_TOKENS" in done.stderr
    assert "--insecure" in done.stderr


def test_port_in_use(sqlite_server: Server, tmp_path: Path) -> None:
    """A port that is taken: the command ends with an error."""
    done = run_server_command(
        "serve", "--port", str(sqlite_server.port), NOISESCALE_DATABASE_URL=f"sqlite:///{tmp_path}/x.db"
    )
    assert done.returncode != 0
    assert "in use" in done.stdout + done.stderr


def test_tokens(tmp_path: Path) -> None:
    """Write tokens write and read, read tokens read, anything else is 401; several count at once."""
    with running_server(tmp_path, write_tokens="old,new", read_tokens="look") as server:
        body, url = report(some_blocks(10)), "/v1/runs/a/blocks"
        refused = server.post(url, body, Authorization="Bearer look")
        assert (refused.status, refused.json()["error"]["code"]) == (403, "forbidden")
        for header in (None, "Bearer wrong", "old", "old", "Bearer ", "Bearer öld", "Basic !"):
            headers = {} if header is None else {"Authorization": header.encode().decode("latin-1")}
            answer = server.post(url, body, **headers)
            assert answer.status == 401, header
            assert "Bearer TOKEN" in answer.json()["error"]["message"]
        for token in ("old", "new"):
            assert server.post(url, body, Authorization=f"Bearer {token}").status == 200
        for path in ("/v1/runs", "/v1/runs/a", "/metrics", "/recommend?run=a", "/metrics/process"):
            assert server.get(path).status == 401, path
            assert server.get(path, Authorization="Bearer wrong").status == 401
            for token in ("look", "old"):
                assert server.get(path, Authorization=f"Bearer {token}").status == 200
        assert server.get("/healthz").status == 200
        log = server.log.read_text()
        for secret in ("wrong", "look", "old,new"):
            assert secret not in log
        assert server.get("/v1/runs/a", Authorization="Bearer look").json()["measured_steps"] == 10


def test_log_is_json_lines_with_request_ids(tmp_path: Path) -> None:
    """One JSON object a line; a failed request has an id that the answer carries too."""
    with running_server(tmp_path, log_level="debug") as server:
        server.post("/v1/runs/a/blocks", {"attempt": -1})
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.strip()]
    assert lines
    assert all("event" in line and "level" in line for line in lines)


def test_too_many_runs(tmp_path: Path) -> None:
    """At the limit a new run is 429 with what to do, and known ones go on."""
    with running_server(tmp_path, max_runs=2) as server:
        for name in ("a", "b"):
            assert server.post(f"/v1/runs/{name}/blocks", report(some_blocks(10))).status == 200
        refused = server.post("/v1/runs/c/blocks", report(some_blocks(10)))
        assert refused.status == 429
        assert "NOISESCALE_MAX_RUNS" in refused.json()["error"]["message"]
        assert server.post("/v1/runs/a/blocks", report(some_blocks(20))).json()["accepted"] == 1
        assert {run["run"] for run in server.get("/v1/runs").json()["runs"]} == {"a", "b"}


def test_database_is_durable_sqlite(tmp_path: Path) -> None:
    """The SQLite file is in WAL mode and synchronous FULL."""
    import asyncio

    async def pragmas() -> tuple[str, int]:
        database = Database(Settings(database_url=f"sqlite:///{tmp_path / 'x.db'}"))
        await database.migrate()
        async with database.engine.connect() as connection:
            mode = (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar_one()
            level = (await connection.exec_driver_sql("PRAGMA synchronous")).scalar_one()
        await database.close()
        return mode, level

    assert asyncio.run(pragmas()) == ("wal", 2)
