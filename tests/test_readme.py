"""The README's code runs, as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import Server, required_tool, running_server

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
DEFAULT_URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that stands where the README says port 8000."""
    with running_server(tmp_path_factory.mktemp("readme")) as running:
        yield running


def test_python_code_runs(server: Server, tmp_path: Path) -> None:
    """The training code, on 2 ranks, reports to the server."""
    (code,) = (text for language, text in BLOCKS if language == "python")
    assert DEFAULT_URL in code
    script = tmp_path / "train.py"
    script.write_text(code.replace(DEFAULT_URL, server.url), encoding="utf-8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.get("/v1/runs/digits-2gpu").json()["last_step"] == 19


def test_commands_run(server: Server) -> None:
    """Every line of shell that asks something of a server or of numbers."""
    lines = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    asked = [line for line in lines if line.startswith(("noisescale ", "curl "))]
    assert len(asked) >= 4
    environment = os.environ | {
        "NOISESCALE_URL": server.url,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    required_tool("curl")
    for line in asked:
        command = shlex.split(line.replace(DEFAULT_URL, server.url), comments=True)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert done.stdout.strip()


def test_make_targets_exist() -> None:
    """The commands of the README are in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z]+)", README):
        assert f"\n{target}:" in makefile


def test_links_lead_somewhere() -> None:
    """Every relative link and picture is a file of the repository."""
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in link:
            assert (ROOT / link).exists(), link
