"""A real server with real runs behind a real Prometheus that loads the configuration under docker/."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from noisescale.blocks import BlockBuilder, MeasuredStep
from noisescale.wire import BlocksReport, RunInfo, TunedBase
from tests.services import (
    Prometheus,
    Server,
    free_port,
    http,
    required_tool,
    running_server,
    stop,
    wait_until,
)
from tests.synthetic import gaussian_moments

DOCKER = Path(__file__).parents[2] / "docker"
READ_TOKEN = "read-token"  # noqa: S105 - of a server that lives as long as a test
WRITE_TOKEN = "write-token"  # noqa: S105
GEOMETRIES = ("euclidean", "adam")
GROUPS = ("total", "encoder", "head")
SCRAPE = "500ms"


class Job:
    """A run as a job reports it: measured steps of the synthetic problem, with groups and geometries."""

    def __init__(self, server: Server, name: str, *, batch: float = 64.0, rate: float = 0.1) -> None:
        self.server, self.name, self.batch, self.rate = server, name, batch, rate
        self._moments = iter(gaussian_moments(steps=20_000, counts=[16] * 4, seed=7))
        self._builder = BlockBuilder(block_steps=20, clock=lambda: 0.0)
        self._step = 0
        self._seq = 0

    def train(self, steps: int, *, skip: bool = False) -> None:
        """Take steps and report them; with `skip` the last one has a non-finite gradient."""
        blocks = []
        for index in range(steps):
            moments = {
                (group, geometry): step
                for step in [next(self._moments)]
                for group in GROUPS
                for geometry in GEOMETRIES
            }
            lost = skip and index == steps - 1
            blocks += self._builder.add(
                MeasuredStep(
                    step=self._step,
                    examples=int(self.batch),
                    global_batch_size=self.batch,
                    learning_rate=self.rate,
                    moments=None if lost else moments,
                )
            )
            self._step += 1
        self.report(blocks=tuple(blocks + self._builder.close(final=True)))

    def report(self, **fields: object) -> None:
        """Send a report; `fields` as in BlocksReport."""
        report = BlocksReport.model_validate(
            {
                "attempt": 1,
                "seq": self._seq,
                "run": RunInfo(
                    optimizer="sgd",
                    dp_world_size=4,
                    micro_batch_size=self.batch / 4,
                    accumulation_steps=1,
                    max_micro_batch_size=1024,
                    tuned=TunedBase(global_batch_size=64, learning_rate=0.1),
                ),
            }
            | fields
        )
        self._seq += 1
        answer = self.server.post(
            f"/v1/runs/{self.name}/blocks",
            report.model_dump_json().encode(),
            Authorization=f"Bearer {WRITE_TOKEN}",
        )
        assert answer.status == 200, answer.text


def configuration(server: Server, folder: Path, *, alertmanager: str | None) -> Path:
    """docker/prometheus as it is, but for where the server and its token are, and how often it is asked."""
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE}
    config["rule_files"] = [str(DOCKER / "prometheus" / "rules" / "*.yml")]
    token = folder / "read_token"
    token.write_text(READ_TOKEN)
    here = [{"targets": [f"127.0.0.1:{server.port}"]}]
    for job in config["scrape_configs"]:
        if job["job_name"].startswith("noisescale"):
            job["authorization"]["credentials_file"] = str(token)
            job.pop("dns_sd_configs", None)
            job["static_configs"] = here
    config["scrape_configs"] = [j for j in config["scrape_configs"] if j["job_name"] != "prometheus"]
    config["alerting"]["alertmanagers"] = (
        [{"static_configs": [{"targets": [alertmanager]}]}] if alertmanager else []
    )
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def running_stack(folder: Path, *, alertmanager: str | None = None) -> Iterator[tuple[Server, Prometheus]]:
    """The server, and Debian's Prometheus scraping both of its pages with our rules loaded."""
    program = required_tool("prometheus")
    tokens = {"write_tokens": WRITE_TOKEN, "read_tokens": READ_TOKEN}
    with running_server(folder / "server", **tokens) as server:
        config = configuration(server, folder, alertmanager=alertmanager)
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
        prometheus = Prometheus(f"http://127.0.0.1:{port}")

        def ready() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            with contextlib.suppress(OSError):
                return http("GET", f"{prometheus.url}/-/ready").status == 200
            return False

        try:
            wait_until(ready, what="Prometheus")
            yield server, prometheus
        finally:
            stop(process)
