"""Processes that the demo starts, and stops whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Self

from noisescale_client.errors import DemoError

GRACE_S = 10.0
"""How long a process may take to end when asked, before it is killed."""

TAIL_LINES = 12


class Child:
    """One process with all that it starts, in a session of its own, its output in a file.

    A session of its own, so that Ctrl-C reaches the demo alone, which then ends its children in
    order; and so that whatever a child started ends with it.

    Args:
        name: For messages: "the server".
        command: What to run.
        log: Where its output goes.
        environment: Its whole environment.
        epilogue: What stands in the log's first line that says only that something failed, not what.

    Raises:
        DemoError: It cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: dict[str, str],
        epilogue: str | None = None,
    ) -> None:
        self.name = name
        self._epilogue = epilogue
        self.log = log
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(  # noqa: S603  our own command, no shell
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise DemoError(f"{name} could not be started: {error}") from error

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._process.poll()

    def failure(self) -> DemoError:
        """What to raise where it ended and should not have."""
        lines = self.log.read_text(errors="replace").splitlines()
        epilogue = self._epilogue
        if epilogue is not None:
            lines = list(takewhile(lambda line: epilogue not in line, lines)) or lines
        said = "\n".join(f"  {line}" for line in lines[-TAIL_LINES:]) or "  (nothing)"
        return DemoError(
            f"{self.name} ended with exit code {self.exit_code}; all it said is in {self.log}, last:\n{said}"
        )

    def stop(self) -> None:
        """Ask it and all it started to end, and kill what does not."""
        for wanted, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            try:
                os.killpg(self._process.pid, wanted)
            except ProcessLookupError:
                break
            try:
                self._process.wait(timeout=patience_s)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                continue  # it does not end, or nobody wants to wait for it: the next signal does it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without settings meant for other servers and jobs, with `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NOISESCALE_")}
    # The folder of this interpreter first, so that children find the same programs.
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return kept | {"PYTHONUNBUFFERED": "1"} | extra


def free_port() -> int:
    """A loopback port that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(ready: Callable[[], bool], *, timeout_s: float, every_s: float = 0.1) -> bool:
    """Ask `ready` again and again until it says yes; whether it did, in time."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
    return True
