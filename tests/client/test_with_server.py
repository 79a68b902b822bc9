"""The client room against the real server: pushed, asked, advised, refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from noisescale.advice import RecommendRequest
from noisescale.recommend import recommend
from noisescale.wire import BlocksReport, RunInfo
from noisescale_client import (
    HttpPusher,
    NoiseScaleClient,
    RequestRefusedError,
    UnauthorizedError,
    UnknownRunError,
)
from noisescale_client.cli import app
from tests.services import Server, running_server
from tests.synthetic import NOISE_SCALE, blocks_of, gaussian_moments

INFO = RunInfo(
    optimizer="sgd", dp_world_size=4, micro_batch_size=16, accumulation_steps=1, max_micro_batch_size=64
)
STEPS = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that holds one run of the synthetic problem, pushed by the real pusher."""
    with running_server(tmp_path_factory.mktemp("server")) as running:
        push(running.url, "synthetic-a")
        yield running


def push(url: str, run: str, *, token: str | None = None) -> HttpPusher:
    moments = gaussian_moments(steps=STEPS, counts=[16] * 4, seed=1)
    pusher = HttpPusher(url, run=run, token=token)
    blocks = blocks_of(moments, learning_rates=[0.1] * STEPS)
    for seq, block in enumerate(blocks):
        pusher.report(BlocksReport(attempt=1, seq=seq, run=INFO, blocks=(block,)))
    pusher.report(BlocksReport(attempt=1, seq=len(blocks), run=INFO, ended=True))
    pusher.close(60)
    return pusher


def call(server: Server, line: str) -> Result:
    return CliRunner().invoke(app, line.split(), env={"NOISESCALE_URL": server.url, "NO_COLOR": "1"})


def test_what_is_pushed_can_be_asked_for(server: Server) -> None:
    """All 1000 steps arrive, in any number of requests; the run knows its layout, its end and its scale."""
    with NoiseScaleClient(server.url) as client:
        (listed,) = client.runs()
        run = client.run("synthetic-a")
        series = client.series("synthetic-a", max_points=10)
    assert (listed.run, listed.state, listed.last_step) == ("synthetic-a", "ended", STEPS - 1)
    assert (run.steps, run.measured_steps, run.dropped_blocks) == (STEPS, STEPS, 0)
    assert run.info.dp_world_size == 4
    assert run.lower is not None
    assert run.lower < NOISE_SCALE
    assert run.upper is None or run.upper > NOISE_SCALE
    assert len(series.points) == 10
    assert series.points[-1].step == STEPS - 1
    assert series.points[-1].lower == run.lower


def test_names_filter_the_list(server: Server) -> None:
    """name_contains and the command's --contains leave out what does not match."""
    with NoiseScaleClient(server.url) as client:
        assert client.runs(name_contains="nothing") == []
        assert [run.run for run in client.runs(name_contains="thetic", limit=1)] == ["synthetic-a"]
    assert json.loads(call(server, "runs --contains nothing --json").stdout) == {"runs": []}


def test_advice_and_what_if_override(server: Server) -> None:
    """The run's advice is to raise; on other ranks the layout changes, and the same batch is offered."""
    with NoiseScaleClient(server.url) as client:
        plain = client.recommend("synthetic-a")
        wider = client.recommend("synthetic-a", target_dp_world_size=8, optimizer="adamw")
    assert (plain.action, plain.global_batch_size_now, plain.global_batch_size) == ("raise", 64, 128)
    assert plain.chosen_rule == "noise_aware_sgd"
    assert wider.layout is not None
    assert wider.layout.dp_world_size == 8
    assert wider.same_batch_option is not None
    assert wider.chosen_rule == "noise_aware_adam"


def test_the_server_and_the_library_advise_alike(server: Server) -> None:
    """POST /recommend through the client is the answer of noisescale.recommend, field by field."""
    request = RecommendRequest.model_validate(
        {
            "global_batch_size": 256,
            "learning_rate": 0.1,
            "optimizer": "adamw",
            "noise_scale": {"lower": 900},
            "measured_steps": 500,
            "weight_decay": 0.01,
        }
    )
    with NoiseScaleClient(server.url) as client:
        assert client.what_if(request) == recommend(request)


def test_an_unknown_run_names_the_nearest(server: Server) -> None:
    """A typo gets UnknownRunError with the run that was meant, and the command one line with it."""
    with NoiseScaleClient(server.url) as client, pytest.raises(UnknownRunError) as caught:
        client.run("synthetic-b")
    assert caught.value.nearest == ("synthetic-a",)
    for line in ("show synthetic-b", "recommend synthetic-b", "recommend synthetic-b --json"):
        result = call(server, line)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "synthetic-a" in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_contradiction_is_refused_with_its_fields(server: Server) -> None:
    """A layout whose product is not the batch is 422, and says which two fields disagree."""
    with NoiseScaleClient(server.url) as client, pytest.raises(RequestRefusedError) as caught:
        client.recommend(
            "synthetic-a", global_batch_size=64, micro_batch_size=5, dp_world_size=3, accumulation_steps=1
        )
    assert caught.value.status == 422
    assert caught.value.fields == ("global_batch_size", "micro_batch_size")
    line = "recommend synthetic-a --global-batch-size 64 --micro-batch-size 5 --world-size 3"
    result = call(server, f"{line} --accumulation-steps 1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "5 x dp_world_size 3 x accumulation_steps 1 = 15" in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("runs", ["synthetic-a", "ended", "raise (below noise scale)"]),
        ("show synthetic-a", ["16 per micro-batch x 4 ranks x 1 accumulation", "euclidean"]),
        ("recommend synthetic-a", ["Raise the global batch from 64 to 128", "32 x 4 x 1", "McCandlish"]),
        ("recommend synthetic-a --target-world-size 8", ["16 x 8 x 1", "Or keep the batch on the new ranks"]),
    ],
)
def test_the_command_says_it_in_words(server: Server, line: str, words: list[str]) -> None:
    """Every question has a readable answer on stdout, and nothing on stderr."""
    result = call(server, line)
    assert (result.exit_code, result.stderr) == (0, "")
    for word in words:
        assert word in result.stdout


@pytest.mark.parametrize("line", ["runs", "show synthetic-a", "recommend synthetic-a"])
def test_json_is_the_servers_own(server: Server, line: str) -> None:
    """--json prints what the API answers, field by field."""
    paths = {"runs": "/v1/runs", "show": "/v1/runs/synthetic-a", "recommend": "/recommend?run=synthetic-a"}
    result = call(server, f"{line} --json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == server.get(paths[line.split()[0]]).json()


def test_tokens(tmp_path: Path) -> None:
    """Where tokens are set: without one nothing arrives, and it is counted; with the right ones all works."""
    with running_server(tmp_path, write_tokens="w1", read_tokens="r1") as guarded:
        refused = push(guarded.url, "x")
        assert refused.dropped_blocks == STEPS // 10
        with NoiseScaleClient(guarded.url) as client, pytest.raises(UnauthorizedError, match="token"):
            client.runs()
        assert push(guarded.url, "x", token="w1").dropped_blocks == 0  # noqa: S106  a test's own
        with NoiseScaleClient(guarded.url, "r1") as client:
            assert client.run("x").steps == STEPS
        result = call(guarded, "runs --token wrong")
        assert result.exit_code == 1
        assert "NOISESCALE_TOKEN" in result.stderr


def test_a_server_that_dies_mid_run_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """kill -9 between reports, start again: the pusher carries on, and every block is there once."""
    blocks = blocks_of(gaussian_moments(steps=400, counts=[16] * 4, seed=2), learning_rates=[0.1] * 400)
    with running_server(tmp_path) as server:
        pusher = HttpPusher(server.url, run="survivor", first_wait_s=0.05)
        for seq, block in enumerate(blocks):
            if seq == len(blocks) // 2:
                assert pusher.flush(60)
                server.kill()
            pusher.report(BlocksReport(attempt=1, seq=seq, run=INFO, blocks=(block,)))
        server.start_again()
        assert pusher.close(60)
        assert pusher.dropped_blocks == 0
        with NoiseScaleClient(server.url) as client:
            run = client.run("survivor")
        assert (run.steps, run.measured_steps) == (400, 400)
