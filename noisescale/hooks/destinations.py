"""What `report_to` may be: a server's URL, a file, or a function."""

import importlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from noisescale.errors import InvalidInputError
from noisescale.sinks import BackgroundSink, Sink
from noisescale.wire import BlocksReport

ReportTo = str | Callable[[BlocksReport], None] | None

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def sink_for(report_to: ReportTo, *, run: str, token: str | None) -> Sink | None:
    """The sink that reports go to; None where none was asked for.

    Args:
        report_to: "http://..." or "https://...", "file:PATH", a function of one
            noisescale.wire.BlocksReport, or None.
        token: Write token of the server; None reads NOISESCALE_TOKEN.

    Raises:
        InvalidInputError: It is none of these.
        ImportError: The client that talks to a server is not installed.
    """
    if report_to is None:
        return None
    if callable(report_to):
        return BackgroundSink(report_to, name=getattr(report_to, "__qualname__", repr(report_to)))
    if report_to.startswith(("http://", "https://")):
        return _http(report_to, run=run, token=token)
    if report_to.startswith("file:") and len(report_to) > len("file:"):
        # By name, for integrations stand above the hooks and may import them.
        jsonl = importlib.import_module("noisescale.integrations.jsonl")
        path = report_to.removeprefix("file:")
        return BackgroundSink(jsonl.JsonlWriter(path, run=run), name=report_to)
    raise InvalidInputError(
        f'report_to={report_to!r} is not understood; pass "http://HOST:PORT" of a noisescale server, '
        '"file:PATH.jsonl", or a function that takes a noisescale.wire.BlocksReport',
        field="report_to",
    )


def run_name(run: str | None) -> str:
    """The given name, checked; or one made of machine, script and time.

    Raises:
        InvalidInputError: The given one cannot be a run's name.
    """
    if run is None:
        script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "python"
        machine = socket.gethostname().split(".")[0]
        made = f"{script[:48]}-{machine[:48]}-{time.strftime('%Y%m%d-%H%M%S')}"
        return re.sub(r"[^A-Za-z0-9._-]", "-", made)
    if not isinstance(run, str) or not _NAME.fullmatch(run):
        raise InvalidInputError(
            f"run={run!r} cannot be a run's name: 1 to 128 letters, digits, dots, underscores and hyphens",
            field="run",
        )
    return run


def _http(url: str, *, run: str, token: str | None) -> Sink:
    try:
        # By name, for the client stands on this package and not under it.
        pusher = importlib.import_module("noisescale_client.pusher")
    except ImportError as error:
        raise ImportError(
            f"reporting to {url} needs the client; install it with: pip install 'noisescale[client]'"
        ) from error
    sink: Sink = pusher.HttpPusher(url, run=run, token=token or os.environ.get("NOISESCALE_TOKEN"))
    return sink
