"""`noisescale demo`: a real training job, a real server, and the advice at the end.

Starts two processes, watches them through the server's own API, draws a picture, and stops them
again, however it ends.
"""

import importlib.util
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from noisescale.advice import Recommendation
from noisescale_client.client import NoiseScaleClient
from noisescale_client.errors import ClientError, DemoError, ServerUnreachableError, UnknownRunError
from noisescale_client.processes import Child, clean_environment, free_port, wait_for
from noisescale_client.progress import Progress, progress_on

RUN = "digits"
RANKS = 2
SERVER_START_S = 60.0
PORT_TRIES = 3
POLL_S = 0.5

NEEDED = {
    "torch": "torch",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "sqlalchemy": "sqlalchemy",
}
"""What the demo's processes import, and the package that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """How the demo runs.

    Attributes:
        steps: Optimizer steps to train for.
        local_batch_size: Per rank; there are two ranks.
        output: Folder for the database, the logs and the picture; made where there is none.
        port: Loopback port of the server; None takes a free one.
        serve: Keep serving at the end until Ctrl-C; None does so in a terminal only.
    """

    steps: int = 8000
    local_batch_size: int = 16
    learning_rate: float = 0.05
    seed: int = 0
    output: Path = Path("demo-output")
    port: int | None = None
    serve: bool | None = None


def run_demo(settings: DemoSettings, *, console: Console) -> Recommendation:
    """Train, watch, advise, draw; and stop every process that was started.

    Raises:
        DemoError: Something is missing, or a process failed.
    """
    check_extras()
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"the demo cannot write to {settings.output}: {error}") from error
    with _stopped_by_signals(), _server(settings) as (server, url), NoiseScaleClient(url) as client:
        console.print(
            f"The server is at {url}; two ranks start training on scikit-learn's handwritten digits."
        )
        with _training(settings, url) as training:
            _watch(settings, client, server=server, training=training, console=console)
        answer = client.recommend(RUN)
        picture = settings.output / "noise-scale.png"
        _draw(client, answer, picture)
        _say_result(answer, picture=picture, url=url, console=console)
        serve = settings.serve if settings.serve is not None else sys.stdout.isatty()
        if serve:
            console.print("\nThe server keeps running; Ctrl-C stops it.")
            _serve_until_stopped(server)
    again = f"NOISESCALE_DATABASE_URL={shlex.quote(_database_url(settings))} noisescale-server serve"
    console.print(
        f"\nThe server has stopped; its data stays. To serve it again:\n\n  {again}", soft_wrap=True
    )
    return answer


def check_extras() -> None:
    """Make sure that all that the demo's processes import is installed.

    Raises:
        DemoError: Something is not; names it.
    """
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DemoError(
            f"the demo also needs {', '.join(missing)}; get all of it with: pip install 'noisescale[demo]'"
        )


@contextmanager
def _server(settings: DemoSettings) -> Iterator[tuple[Child, str]]:
    """A server of the demo's own, ready, with an empty database of its own."""
    database = _database(settings)
    for leftover in (database, *(database.with_name(database.name + end) for end in ("-wal", "-shm"))):
        leftover.unlink(missing_ok=True)
    environment = clean_environment(NOISESCALE_DATABASE_URL=_database_url(settings))
    # A free port may be taken by another process before the server has it: then try another one.
    for attempts_left in reversed(range(PORT_TRIES if settings.port is None else 1)):
        port = settings.port if settings.port is not None else free_port()
        command = [
            sys.executable,
            "-m",
            "noisescale_server",
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        url = f"http://127.0.0.1:{port}"
        with Child(
            "the server", command, log=settings.output / "server.log", environment=environment
        ) as server:
            if not wait_for(lambda: _answers(server, url), timeout_s=SERVER_START_S):  # noqa: B023  called here only
                raise DemoError(f"the server did not answer within {SERVER_START_S:g} s; see {server.log}")
            if server.exit_code is None:
                yield server, url
                return
            if attempts_left == 0:
                raise server.failure()


def _database(settings: DemoSettings) -> Path:
    return settings.output.resolve() / "demo.db"


def _database_url(settings: DemoSettings) -> str:
    return f"sqlite:///{_database(settings)}"


def _answers(server: Child, url: str) -> bool:
    """Whether there is nothing more to wait for: it answers, or it has ended."""
    if server.exit_code is not None:
        return True
    try:
        with NoiseScaleClient(url, timeout_s=1.0) as client:
            client.runs()
    except ServerUnreachableError:
        return False
    return True


def _training(settings: DemoSettings, url: str) -> Child:
    """The training job: what a user would type, with the server's URL."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("-m", "noisescale.hooks.digits"),
        *("--steps", str(settings.steps), "--local-batch-size", str(settings.local_batch_size)),
        *("--learning-rate", str(settings.learning_rate), "--seed", str(settings.seed)),
        *("--report-to", url, "--run-name", RUN),
    ]
    environment = clean_environment(OMP_NUM_THREADS="1")  # one core per rank
    return Child(
        "the training job",
        command,
        log=settings.output / "training.log",
        environment=environment,
        epilogue="torch/distributed/elastic/multiprocessing/api.py",
    )


def _watch(
    settings: DemoSettings, client: NoiseScaleClient, *, server: Child, training: Child, console: Console
) -> None:
    """Show progress until the training job has ended well.

    Raises:
        DemoError: The training job or the server failed.
    """
    with progress_on(console, steps=settings.steps) as progress:
        while training.exit_code is None:
            if server.exit_code is not None:
                raise server.failure()
            _show(client, progress)
            time.sleep(POLL_S)
        if training.exit_code != 0:
            raise training.failure()
        _show(client, progress)


def _show(client: NoiseScaleClient, progress: Progress) -> None:
    try:
        progress.show(client.run(RUN))
    except (UnknownRunError, ServerUnreachableError):
        return  # nothing has been reported yet, or the server is busy just now: the next look tells


def _draw(client: NoiseScaleClient, answer: Recommendation, picture: Path) -> None:
    # Here and not above: every other command does without matplotlib.
    from noisescale_client.picture import save_picture

    save_picture(client.series(RUN), answer, picture)


def _say_result(answer: Recommendation, *, picture: Path, url: str, console: Console) -> None:
    console.print()
    console.print(answer.explanation)
    console.print()
    rows = {
        "picture": str(picture),
        "web page": f"{url}/",
        "this advice": f"{url}/recommend?run={RUN}",
        "metrics": f"{url}/metrics",
        "API": f"{url}/docs",
    }
    for label, value in rows.items():
        console.print(f"  {label:<12} {value}", soft_wrap=True)
    command = f"noisescale recommend {RUN} --url {url} --target-world-size 8"
    console.print(f"  {'on 8 ranks':<12} {command}", soft_wrap=True)


def _serve_until_stopped(server: Child) -> None:
    try:
        while server.exit_code is None:
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return
    raise server.failure()


class _StoppedError(ClientError):
    """A signal that asks the demo to end."""


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """End in order, children first, also where a terminal closes or a supervisor says so."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for wanted in before:
            signal.signal(wanted, signal.SIG_IGN)  # a second one must not cut the clean-up short
        raise _StoppedError(f"stopped by {signal.Signals(number).name}")

    before = {wanted: signal.signal(wanted, stop) for wanted in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for wanted, handler in before.items():
            signal.signal(wanted, handler)
