"""Processes of the demo: they end with it, with all that they started."""

import os
import sys
import time
from pathlib import Path

import pytest

from noisescale_client.errors import DemoError
from noisescale_client.processes import Child, clean_environment, free_port, wait_for


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_stopping_a_child_stops_its_children(tmp_path: Path) -> None:
    """A grandchild that ignores SIGTERM is gone too when the block ends."""
    grandchild = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    with Child("the parent", python(code), log=log, environment=clean_environment()) as child:
        assert wait_for(lambda: log.read_text().endswith("\n"), timeout_s=60)
        pid = int(log.read_text())
        assert is_alive(pid)
        assert child.exit_code is None
    assert child.exit_code is not None
    assert wait_for(lambda: not is_alive(pid), timeout_s=60)


def test_a_failure_says_the_exit_code_and_the_last_words(tmp_path: Path) -> None:
    """The error of a child that died holds its name, its exit code, and the end of its log only."""
    code = "print(*range(100), sep='\\n'); import sys; sys.exit('no more')"
    with Child("the job", python(code), log=tmp_path / "log", environment=clean_environment()) as child:
        assert wait_for(lambda: child.exit_code is not None, timeout_s=60)
        message = str(child.failure())
    assert "the job ended with exit code 1" in message
    assert "no more" in message
    assert str(tmp_path / "log") in message
    assert "\n  99\n" in message
    assert "\n  10\n" not in message


def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    """A command that cannot be started says which process that was."""
    with pytest.raises(DemoError, match="the server could not be started"):
        Child("the server", ["/no/such/program"], log=tmp_path / "log", environment=clean_environment())


def test_settings_for_others_do_not_reach_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's NOISESCALE_* (a token, a database) stays out; all else and what is added is there."""
    monkeypatch.setenv("NOISESCALE_TOKEN", "secret")
    monkeypatch.setenv("NOISESCALE_DATABASE_URL", "postgresql://production")
    monkeypatch.setenv("LANG", "C.UTF-8")
    environment = clean_environment(OMP_NUM_THREADS="1")
    assert not any(key.startswith("NOISESCALE_") for key in environment)
    assert (environment["LANG"], environment["OMP_NUM_THREADS"]) == ("C.UTF-8", "1")
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_waiting_ends_in_time() -> None:
    """wait_for answers False when its time is over and True as soon as it may."""
    started = time.monotonic()
    assert not wait_for(lambda: False, timeout_s=0.2, every_s=0.01)
    assert time.monotonic() - started >= 0.2
    assert wait_for(lambda: True, timeout_s=0.0)
    assert 1 <= free_port() <= 65535
