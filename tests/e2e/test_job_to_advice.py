"""The whole path, with nothing standing in: a 2-rank job, the server, Prometheus, advice."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import Prometheus, Server, running_prometheus, running_server, wait_until

STEPS = 600


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Prometheus]]:
    """A server and a Prometheus that scrapes it, after a real job reported to the one."""
    folder = tmp_path_factory.mktemp("e2e")
    with (
        running_server(folder / "server") as server,
        running_prometheus(server.url, folder=folder / "prometheus") as prometheus,
    ):
        train(server.url, run="digits")
        yield server, prometheus


def train(url: str, *, run: str) -> None:
    """scikit-learn's digits on 2 gloo ranks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "noisescale.hooks.digits", "--steps", str(STEPS), "--report-to", url, "--run-name", run,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_step_arrives(place: tuple[Server, Prometheus]) -> None:
    """All steps of both ranks are accounted for, and the job said that it is done."""
    server, _ = place
    run = server.get("/v1/runs/digits").json()
    assert run["state"] == "ended"
    assert run["last_step"] == STEPS - 1
    assert run["measured_steps"] == run["steps"] == STEPS
    assert run["examples"] == STEPS * run["global_batch_size"]
    assert run["dropped_blocks"] == 0
    assert run["info"]["dp_world_size"] == 2
    assert run["info"]["optimizer"] == "sgd"
    assert run["info"]["micro_batch_size"] == run["global_batch_size"] / 2


def test_prometheus_has_the_noise_scale(place: tuple[Server, Prometheus]) -> None:
    """PromQL gives back the number that the server's API gives, with its interval."""
    server, prometheus = place
    run = server.get("/v1/runs/digits").json()
    query = 'noisescale_noise_scale{run_id="digits",geometry="euclidean",group="total"}'
    wait_until(
        lambda: prometheus.value(query) == pytest.approx(run["noise_scale"], rel=1e-9), what="the scrape"
    )
    lower = prometheus.value('noisescale_noise_scale_lower{run_id="digits"}')
    assert lower == pytest.approx(run["lower"])
    upper = prometheus.value('noisescale_noise_scale_upper{run_id="digits"}')
    assert upper == (None if run["upper"] is None else pytest.approx(run["upper"]))
    assert prometheus.value('noisescale_steps_total{run_id="digits"}') == STEPS
    assert prometheus.value('sum(noisescale_recommendation{run_id="digits"})') == 1


def test_recommend_answers_with_reasons(place: tuple[Server, Prometheus]) -> None:
    """Advice in JSON and in words, and the same at the command line."""
    server, prometheus = place
    advice = server.get("/recommend?run=digits").json()
    assert advice["action"] in ("raise", "lower", "hold", "lr_only")
    assert advice["noise_scale"]["lower"] > 0
    assert advice["sources"]
    action = prometheus.query('noisescale_recommendation{run_id="digits"} == 1')
    assert [sample["metric"]["action"] for sample in action] == [advice["action"]]
    text = server.get("/recommend?run=digits", Accept="text/plain").text
    assert text.strip() == advice["explanation"]
    told = subprocess.run(
        [sys.executable, "-m", "noisescale_client", "recommend", "digits", "--json", "--url", server.url],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(told.stdout) == advice


def test_more_ranks_are_supposed(place: tuple[Server, Prometheus]) -> None:
    """What if there were 8 ranks: the same batch and rate are always an option."""
    server, _ = place
    advice = server.get("/recommend?run=digits&target_dp_world_size=8").json()
    option = advice["same_batch_option"]
    batch = option["micro_batch_size"] * option["dp_world_size"] * option["accumulation_steps"]
    assert (option["dp_world_size"], batch) == (8, advice["global_batch_size_now"])
    assert option["learning_rate"] == advice["learning_rate_now"]


def test_job_without_a_server_is_advised_alike(place: tuple[Server, Prometheus], tmp_path: Path) -> None:
    """The same job reporting to a file: the same seed gives the same noise scale."""
    server, _ = place
    train(f"file:{tmp_path / 'run.jsonl'}", run="digits")
    reports = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert reports[-1]["ended"]
    sums = [block["sums"][0] for report in reports for block in report["blocks"]]
    series = server.get("/v1/runs/digits").json()["estimates"][0]
    assert series["measured_steps"] == STEPS
    ratio = sum(s["trace_covariance"] for s in sums) / sum(s["true_grad_sq_norm"] for s in sums)
    assert ratio == pytest.approx(series["noise_scale"], rel=1e-6)
