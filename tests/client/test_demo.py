"""The demo, end to end: real training on two ranks, a real server, advice, and nothing left behind."""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from noisescale_client import NoiseScaleClient, ServerUnreachableError, UnknownRunError
from noisescale_client.cli import app
from noisescale_client.processes import free_port
from tests.services import wait_until

COMMAND = Path(sys.executable).with_name("noisescale")


def processes_with(text: str) -> list[str]:
    """Command lines of running processes that contain `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it ended while we looked
            if text in command:
                found.append(command)
    return found


def start(
    output: Path, port: int, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """The demo with its output in pipes."""
    return subprocess.Popen(
        [COMMAND, "demo", "--output", str(output), "--port", str(port), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (environment or {}),
    )


def has_trained(port: int) -> bool:
    """Whether the server has steps of the training job."""
    try:
        with NoiseScaleClient(f"http://127.0.0.1:{port}") as client:
            return client.run("digits").last_step is not None
    except (ServerUnreachableError, UnknownRunError):
        return False


def nothing_is_left_of(port: int) -> None:
    """The server and both ranks are gone: their command lines hold the port."""
    wait_until(lambda: not processes_with(f"127.0.0.1:{port}"), what="the end of the training job")
    wait_until(lambda: not processes_with(f"--port {port}"), what="the end of the server")


def test_the_demo_trains_advises_draws_and_ends(tmp_path: Path) -> None:
    """Without a terminal: progress as lines, advice in words, a picture, URLs; exit 0, nothing left."""
    port = free_port()
    demo = start(tmp_path / "out", port, "--steps", "600")
    output, errors = demo.communicate(timeout=170)
    assert demo.returncode == 0, errors + output
    assert re.search(r"step 600/600  noise scale \d.* examples  batch 32", output)
    assert "The gradient noise scale is" in output
    for path in ("/", "/recommend?run=digits", "/metrics", "/docs"):
        assert f"http://127.0.0.1:{port}{path}\n" in output
    assert "\x1b" not in output
    assert imread(tmp_path / "out" / "noise-scale.png").shape[:2] == (840, 1500)
    assert (tmp_path / "out" / "demo.db").stat().st_size > 0
    nothing_is_left_of(port)


def test_in_a_terminal_the_demo_serves_until_ctrl_c(tmp_path: Path) -> None:
    """With a terminal: a bar, then the server goes on answering until Ctrl-C, which ends it with exit 0."""
    port = free_port()
    ours, theirs = pty.openpty()
    demo = subprocess.Popen(
        [COMMAND, "demo", "--output", str(tmp_path), "--port", str(port), "--steps", "200"],
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"},
    )
    os.close(theirs)
    seen = b""
    while b"Ctrl-C stops it" not in seen:
        piece = os.read(ours, 65536)
        assert piece, seen.decode(errors="replace")
        seen += piece
    text = seen.decode(errors="replace")
    assert "200/200" in text
    assert "noise scale" in text
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/recommend?run=digits", timeout=60) as answer:
        assert answer.status == 200
    demo.send_signal(signal.SIGINT)
    assert demo.wait(timeout=60) == 0
    os.close(ours)
    nothing_is_left_of(port)


def test_stopped_in_the_middle_the_demo_takes_its_children_along(tmp_path: Path) -> None:
    """SIGTERM while both ranks train: one line on stderr, exit 1, no process left."""
    port = free_port()
    demo = start(tmp_path, port)
    wait_until(lambda: has_trained(port), what="the first report of the training job")
    assert len(processes_with(f"127.0.0.1:{port}")) >= 3, "torchrun and two ranks"
    demo.send_signal(signal.SIGTERM)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert errors == "noisescale: stopped by SIGTERM\n"
    nothing_is_left_of(port)


def test_a_crash_of_the_training_job_is_shown(tmp_path: Path) -> None:
    """A rank that raises: the reason itself is on stderr, not torchrun's report of it; nothing is left."""
    (tmp_path / "sklearn.py").write_text("raise ImportError('this scikit-learn is broken')\n")
    port = free_port()
    demo = start(tmp_path / "out", port, environment={"PYTHONPATH": str(tmp_path)})
    _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert "the training job ended with exit code 1" in errors
    assert "this scikit-learn is broken" in errors
    assert "ChildFailedError" not in errors
    assert "Traceback" not in errors.splitlines()[0]
    nothing_is_left_of(port)


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    """--port of another process: the server's own words, exit 1, and no training is started."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        demo = start(tmp_path, port)
        _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert "the server ended with exit code" in errors
    assert "address already in use" in errors
    assert not (tmp_path / "training.log").exists()


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without torch and matplotlib the demo says so and what to install, before anything is started."""
    for module in ("torch", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "noisescale: the demo also needs torch, matplotlib; get all of it with: pip"
    )
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
