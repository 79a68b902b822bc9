"""The code of the README and of the documentation runs, as it stands there."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from json import loads
from pathlib import Path

import pytest
import yaml

from noisescale.wire import BlocksReport, RunInfo
from tests.docs.pages import ROOT, Block, blocks, programs
from tests.docs.shell import URL, Shell, matches
from tests.services import (
    Prometheus,
    Server,
    free_port,
    required_tool,
    running_postgres,
    running_prometheus,
    running_server,
    wait_until,
)
from tests.synthetic import blocks_of, gaussian_moments

RUNS = ("resnet50-8gpu", "digits-2gpu")
"""The runs that the pages speak of."""

pytestmark = pytest.mark.timeout(300)


def named(found: Iterator[Block]) -> list[object]:
    """One test a block."""
    return [pytest.param(block, id=block.name) for block in found]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that stands where the pages say port 8000, and knows their runs."""
    with running_server(tmp_path_factory.mktemp("docs")) as running:
        moments = gaussian_moments(steps=600, counts=[16] * 4, seed=1)
        report = BlocksReport(
            attempt=1,
            run=RunInfo(optimizer="sgd", dp_world_size=4, micro_batch_size=16, accumulation_steps=1),
            blocks=tuple(blocks_of(moments)),
        )
        for run in RUNS:
            answer = running.post(f"/v1/runs/{run}/blocks", report.model_dump_json().encode())
            assert answer.status == 200, answer.text
        yield running


@pytest.fixture(scope="module")
def postgres() -> Iterator[Callable[[], str]]:
    """A PostgreSQL that starts when a page first needs it."""
    started: list[str] = []
    with ExitStack() as stack:

        def url() -> str:
            if not started:
                started.append(stack.enter_context(running_postgres()))
            return started[0]

        yield url


@pytest.fixture
def shell(server: Server, postgres: Callable[[], str], tmp_path: Path) -> Shell:
    """Where lines run."""
    return Shell(server, postgres, tmp_path)


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped the server."""
    with running_prometheus(server.url, folder=tmp_path_factory.mktemp("prometheus")) as running:
        wait_until(lambda: running.query("noisescale_noise_scale"), what="a scraped run")
        yield running


# Ends the process as soon as the program and what it left for the exit are done. PyTorch aborts a process
# now and then whose interpreter ends while gloo's threads hold its last tensors (pytorch/pytorch#179291).
RUN = """
import atexit, os, runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("program", named(programs()))
def test_python_runs(program: Block, server: Server, tmp_path: Path) -> None:
    """Every program; one that joins a process group on 2 ranks, as torchrun starts them."""
    script = tmp_path / "program.py"
    script.write_text(program.text.replace(URL, server.url), encoding="utf-8")
    world = 2 if "init_process_group" in program.text else 1
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "NOISESCALE_URL": server.url,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(script)],
            cwd=tmp_path,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)


@pytest.mark.parametrize("block", named(blocks("sh")))
def test_commands_run(block: Block, shell: Shell) -> None:
    """Every line of shell is run, or checked where it needs another machine."""
    shell.run_block(block.text)


@pytest.mark.parametrize("block", named(blocks("console")))
def test_answers_are_the_real_ones(block: Block, shell: Shell) -> None:
    """What a page shows under a command is what the command prints, but for line breaks and `...`."""
    for part in re.split(r"^\$ ", block.text.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        printed = shell.run(command)
        assert matches(expected, printed), f"{command}\nprinted:\n{printed}"


@pytest.mark.parametrize("block", named(blocks("json")))
def test_json_parses(block: Block) -> None:
    """Every block of JSON."""
    loads(block.text)


@pytest.mark.parametrize("block", named(blocks("yaml")))
def test_yaml_is_right(block: Block, tmp_path: Path) -> None:
    """Every block of YAML parses; one for Prometheus is what promtool accepts."""
    parsed = yaml.safe_load(block.text)
    if isinstance(parsed, dict) and parsed.keys() & {"scrape_configs", "remote_write"}:
        path = tmp_path / "prometheus.yml"
        path.write_text(block.text)
        command = [required_tool("promtool"), "check", "config", "--syntax-only", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", named(blocks("promql")))
def test_queries_have_answers(block: Block, prometheus: Prometheus) -> None:
    """Every line of PromQL answers something about a run."""
    for line in block.text.splitlines():
        if line and not line.startswith("#"):
            assert wait_until(lambda line=line: prometheus.query(line), timeout_s=10, what=line)


def test_queries_of_the_readme_have_answers(prometheus: Prometheus) -> None:
    """The PromQL in the README's table, too."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`noisescale_.*?) \|", readme, flags=re.MULTILINE)
    assert len(rows) >= 5
    for row in rows:
        for query in re.findall(r"`([^`]+)`", row):
            assert wait_until(lambda query=query: prometheus.query(query), timeout_s=10, what=query)


def test_every_block_is_of_a_language_that_is_checked() -> None:
    """No block escapes by its fence's word; `text` is for what is no code."""
    known = {"python", "sh", "console", "json", "yaml", "promql", "text", "{eval-rst}", "{toctree}"}
    for page in {block.page for block in blocks(*known)}:
        fences = set(re.findall(r"^```(\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
        assert fences <= known, page
