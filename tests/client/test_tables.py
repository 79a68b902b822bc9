"""What a person reads: runs, one run, advice and progress."""

import io
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from noisescale.advice import RecommendRequest
from noisescale.estimate import Estimate
from noisescale.recommend import recommend
from noisescale.wire import RunDetail, RunInfo, RunList, RunSummary
from noisescale_client.cli import app
from noisescale_client.progress import progress_on
from noisescale_client.tables import age_in_words, console_for, interval_in_words, recommendation_view
from tests.client.wire_server import Reply, wire_server


def a_run(**changes: object) -> RunDetail:
    run = RunDetail(
        run="resnet50-8gpu",
        state="running",
        noise_scale=15000.0,
        lower=10000.0,
        upper=22000.0,
        global_batch_size=256.0,
        learning_rate=0.1,
        action="raise",
        reason="below_noise_scale",
        last_step=4999,
        measured_steps=1000,
        last_report_at=time.time() - 7200,
        info=RunInfo(
            optimizer="sgd", dp_world_size=8, micro_batch_size=32, accumulation_steps=1, labels={"team": "v"}
        ),
        attempts=[1, 2],
        phase="steady",
        estimates=[Estimate(noise_scale=15000.0, lower=10000.0, upper=22000.0, measured_steps=1000)],
        steps=5000,
        examples=1_280_000,
        skipped_steps=3,
        dropped_blocks=0,
    )
    return run.model_copy(update=changes)


def shown(command: str, body: str) -> str:
    with wire_server() as server:
        server.always = Reply(status=200, body=body.encode())
        result = CliRunner().invoke(app, [*command.split(), "--url", server.url])
        assert result.exit_code == 0, result.stderr
        return result.stdout + result.stderr


def test_runs_are_one_a_line() -> None:
    """Every run is a line with its state, batch, noise scale and advice; a new one has dashes."""
    old = RunSummary.model_validate(a_run().model_dump())
    new = RunSummary(run="just-started", state="running", last_report_at=time.time())
    lines = shown("runs", RunList(runs=[old, new]).model_dump_json()).splitlines()
    first = next(line for line in lines if line.startswith("resnet50-8gpu"))
    for expected in (
        "running",
        "256",
        "0.1",
        "15,000 [10,000 to 22,000]",
        "raise (below noise scale)",
        "2 h ago",
    ):
        assert expected in first
    second = next(line for line in lines if line.startswith("just-started"))
    assert "not known yet" in second


def test_no_runs_is_a_hint() -> None:
    """An empty server answers with what to write to get a run there."""
    assert "noisescale.attach(model, optimizer, report_to=" in shown("runs", '{"runs": []}')


def test_show_has_layout_progress_and_estimates() -> None:
    """One run: its layout, steps, phase, labels and a line for each noise scale."""
    text = shown("show resnet50-8gpu", a_run().model_dump_json())
    for expected in (
        "32 per micro-batch x 8 ranks x 1 accumulation",
        "5,000 (1,000 measured)",
        "0.1 (steady)",
        "team=v",
        "euclidean",
        "15,000 [10,000 to 22,000]",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ({"noise_scale": 250.0, "lower": 210.0, "upper": 303.0}, "250 [210 to 303]"),
        ({"noise_scale": 250.0, "lower": 210.0, "upper": None}, "at least 210"),
        ({"noise_scale": None, "lower": 210.0, "upper": 303.0}, "[210 to 303]"),
        ({"noise_scale": None, "lower": 0.0, "upper": None}, "not known yet"),
        ({"noise_scale": None, "lower": None, "upper": None}, "not known yet"),
        ({"noise_scale": 3.0, "lower": 0.0, "upper": 9.0}, "3 [0 to 9]"),
    ],
)
def test_an_interval_never_claims_more_than_is_known(interval: dict[str, float | None], words: str) -> None:
    """Without an upper end there is no point value, and without a lower end there is nothing."""
    assert interval_in_words(**interval) == words


def test_ages_are_in_the_unit_that_fits() -> None:
    """Seconds, minutes, hours, days; a clock that is ahead is now."""
    ages = [age_in_words(seconds) for seconds in (-5, 12, 180, 18_000, 172_800)]
    assert ages == ["0 s ago", "12 s ago", "3 min ago", "5 h ago", "2 d ago"]


@pytest.mark.parametrize("extra", [{}, {"target_global_batch_size": 1024}, {"dp_world_size": 8}])
def test_advice_has_now_and_then_side_by_side(extra: dict[str, float]) -> None:
    """The view holds the explanation whole, both batches, and the planned one where one is planned."""
    request = {
        "global_batch_size": 256,
        "learning_rate": 0.1,
        "optimizer": "sgd",
        "measured_steps": 500,
        "noise_scale": {"value": 15000, "lower": 10000, "upper": 22000},
    }
    answer = recommend(RecommendRequest.model_validate(request | extra))
    console = Console(file=io.StringIO(), width=120)
    console.print(recommendation_view(answer, run="resnet50"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert " ".join(answer.explanation.split()) in " ".join(text.split())
    assert ("as planned" in text) == ("target_global_batch_size" in extra)
    assert ("32 x 8 x 1" in text) == ("dp_world_size" in extra)


def test_progress_without_a_terminal_is_plain_lines() -> None:
    """Into a pipe: whole lines without control codes, none twice, and always one for the end."""
    console = Console(file=io.StringIO(), width=200)
    with progress_on(console, steps=5000) as progress:
        for last_step in (None, 9, 10, 4998, 4999, 4999):
            progress.show(a_run(last_step=last_step))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines == [
        f"step {step}/5000  noise scale 15,000 [10,000 to 22,000] examples  "
        "batch 256   advice: raise (below noise scale)"
        for step in (10, 5000)
    ]


def test_progress_in_a_terminal_is_a_bar_with_a_live_line() -> None:
    """A terminal gets a bar with steps done, and the noise scale below it."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with progress_on(console, steps=10_000) as progress:
        progress.show(a_run())
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "5000/10000" in text
    assert "noise scale 15,000 [10,000 to 22,000] examples" in text


def test_a_pipe_gets_whole_lines() -> None:
    """Where the output is no terminal, tables are not squeezed into 80 columns."""
    assert console_for().width >= 120
