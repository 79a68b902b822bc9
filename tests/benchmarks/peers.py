"""What is measured: our server on either database, and Debian's prometheus-pushgateway."""

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from noisescale_server.database import Database
from noisescale_server.settings import Settings
from tests.services import (
    Server,
    free_port,
    http,
    required_tool,
    running_postgres,
    running_server,
    stop,
    wait_until,
)

DATABASES = ("sqlite", "postgres")


@contextlib.contextmanager
def running_on(database: str, folder: Path, **settings: object) -> Iterator[Server]:
    """Our server on "sqlite" or on a "postgres" of its own."""
    if database == "sqlite":
        with running_server(folder, **settings) as server:
            yield server
        return
    with running_postgres() as url:
        asyncio.run(_migrate(url))
        with running_server(folder, database_url=url, **settings) as server:
            yield server


async def _migrate(url: str) -> None:
    database = Database(Settings(database_url=url))
    await database.migrate()
    await database.close()


@contextlib.contextmanager
def running_pushgateway(
    *, kept: Path | None = None, checks: bool = True
) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """A pushgateway; its port and process.

    Args:
        kept: Where it finds what it had when it was stopped, and writes it when it is stopped; all
            in memory alone where None. While it runs nothing is written.
        checks: Whether it checks each push for consistency with all it has, as it does by default.
    """
    program = required_tool("prometheus-pushgateway")
    port = free_port()
    process = subprocess.Popen(
        [
            program,
            f"--web.listen-address=127.0.0.1:{port}",
            f"--persistence.file={kept or ''}",
            "--persistence.interval=24h",
            "--log.level=error",
            *([] if checks else ["--push.disable-consistency-check"]),
        ],
        stderr=subprocess.DEVNULL,
    )

    def ready() -> bool:
        assert process.poll() is None, "the pushgateway ended at once"
        try:
            return http("GET", f"http://127.0.0.1:{port}/-/ready").status == 200
        except OSError:
            return False

    try:
        wait_until(ready, what="the pushgateway")
        yield port, process
    finally:
        stop(process)


def cpu_seconds(process: "subprocess.Popen[bytes]") -> float:
    """Of a process and its children so far."""
    found = psutil.Process(process.pid)
    times = [one.cpu_times() for one in [found, *found.children(recursive=True)]]
    return sum(time.user + time.system for time in times)
