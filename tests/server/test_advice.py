"""/recommend answers with the vectors' fields, reasons and sources, for runs and for given numbers."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from noisescale.advice import RecommendRequest
from noisescale.recommend import recommend
from tests.server.reports import report, some_blocks
from tests.services import Server

ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "recommend.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def advised(sqlite_server: Server) -> Server:
    """A server with a run whose noise scale is 400, at a batch of 64, and some others."""
    for name, seed in (("resnet50-8gpu", 0), ("resnet50-4gpu", 1), ("gpt", 2)):
        sqlite_server.post(f"/v1/runs/{name}/blocks", report(some_blocks(3000, seed=seed)))
    sqlite_server.post("/v1/runs/not-begun/blocks", report())
    return sqlite_server


def ask(server: Server, **parameters: object) -> dict[str, Any]:
    """GET /recommend, answered 200."""
    answer = server.get(f"/recommend?{urlencode(parameters)}")
    assert answer.status == 200, answer.text
    advice: dict[str, Any] = answer.json()
    return advice


def test_advice_on_a_run(advised: Server) -> None:
    """The noise scale with its interval, the action, the numbers, why, how sure, and from where."""
    advice = ask(advised, run="resnet50-8gpu")
    noise_scale = advice["noise_scale"]
    assert noise_scale["lower"] < noise_scale["value"] < noise_scale["upper"]
    assert noise_scale["geometry"] == "euclidean"
    assert 200 < noise_scale["value"] < 800
    assert advice["action"] in ("raise", "hold")
    assert advice["confidence"] in ("low", "medium", "none")
    assert f"{advice['global_batch_size_now']:g}" in advice["explanation"]
    assert all(source for source in advice["sources"])
    assert advice["facts"]
    assert advice["measured_steps"] == 1000  # the window's; all 3,000 are of one regime


def test_what_if_overrides_what_was_reported(advised: Server) -> None:
    """Parameters replace what the run said of itself; the noise scale stays the measured one."""
    plain = ask(advised, run="resnet50-8gpu")
    supposed = ask(advised, run="resnet50-8gpu", optimizer="adamw", beta2=0.95, max_micro_batch_size=64)
    assert supposed["noise_scale"] == plain["noise_scale"]
    assert supposed["formula"] != plain["formula"]
    more = ask(advised, run="resnet50-8gpu", target_dp_world_size=8)
    assert more["same_batch_option"] == {
        "micro_batch_size": 8,
        "dp_world_size": 8,
        "accumulation_steps": 1,
        "learning_rate": plain["learning_rate_now"],
    }


def test_planned_batch_is_answered_with_every_rule(advised: Server) -> None:
    """target_global_batch_size: the LR by each rule, beside the advice."""
    plan = ask(advised, run="resnet50-8gpu", target_global_batch_size=128)["plan"]
    assert plan["global_batch_size"] == 128
    assert plan["rules"]["linear"] == pytest.approx(0.2)
    assert plan["rules"]["square_root"] == pytest.approx(0.1 * 2**0.5)


def test_explanation_alone(advised: Server) -> None:
    """Accept: text/plain gives the sentences and nothing else."""
    advice = ask(advised, run="gpt")
    answer = advised.get("/recommend?run=gpt", Accept="text/plain")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == advice["explanation"] + "\n"
    both = advised.get("/recommend?run=gpt", Accept="application/json, text/plain")
    assert both.json() == advice


def test_unknown_run_names_the_nearest(advised: Server) -> None:
    """404 with the most similar names, in the message and as a list."""
    for path in ("/recommend?run=resnet50-8gpus", "/v1/runs/resnet50-8gpus"):
        answer = advised.get(path)
        assert answer.status == 404
        error = answer.json()["error"]
        assert error["code"] == "unknown_run"
        assert error["nearest"][0] == "resnet50-8gpu"
        assert "resnet50-4gpu" in error["nearest"]
        assert "resnet50-8gpu" in error["message"]


def test_run_that_has_not_measured(advised: Server) -> None:
    """A run without a block is known, and has no advice yet: 409."""
    answer = advised.get("/recommend?run=not-begun")
    assert answer.status == 409
    assert "not measured a step yet" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {"global_batch_size": 64, "micro_batch_size": 7, "dp_world_size": 4, "accumulation_steps": 1},
            ["global_batch_size", "micro_batch_size", "64", "28"],
        ),
        ({"target_dp_world": 8}, ["did you mean target_dp_world_size"]),
        ({"learning_rate": "fast"}, ["learning_rate"]),
        ({"learning_rate": -1}, ["learning_rate"]),
        ({"target_dp_world_size": 0}, ["target_dp_world_size"]),
        ({"target_dp_world_size": "9" * 400}, ["target_dp_world_size"]),
        ({"learning_rate": "nan"}, ["learning_rate"]),
        ({"learning_rate": "inf"}, ["learning_rate"]),
        ({"optimizer": "sdg"}, ["optimizer"]),
    ],
)
def test_contradictions_and_nonsense(advised: Server, parameters: dict[str, Any], words: list[str]) -> None:
    """422 that names the fields which disagree, or the one that cannot be."""
    answer = advised.get(f"/recommend?{urlencode({'run': 'resnet50-8gpu'} | parameters)}")
    assert answer.status == 422, answer.text
    error = answer.json()["error"]
    for word in words:
        assert word in error["message"] + " ".join(error["fields"])


def test_layout_that_does_not_multiply(advised: Server) -> None:
    """POST: a layout whose product is not the global batch is 422, with the two fields' names."""
    state = {
        "global_batch_size": 256,
        "learning_rate": 0.1,
        "dp_world_size": 8,
        "micro_batch_size": 16,
        "accumulation_steps": 1,
        "noise_scale": {"value": 15000, "lower": 10000, "upper": 22000},
        "measured_steps": 500,
    }
    answer = advised.post("/recommend", state)
    assert answer.status == 422
    error = answer.json()["error"]
    assert error["code"] == "contradiction"
    assert len(error["fields"]) == 2
    assert "global_batch_size" in error["fields"]
    assert "256" in error["message"]
    assert "128" in error["message"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["name"]).split()[0])
def test_given_numbers_are_answered_as_the_core_does(advised: Server, row: dict[str, Any]) -> None:
    """POST /recommend of every worked row is what noisescale.recommend gives, to the last digit."""
    given = row["request"]
    answer = advised.post("/recommend", given)
    assert answer.status == row["response"].get("status", 200), answer.text
    if answer.status != 200:
        return
    wanted = recommend(RecommendRequest.model_validate(given))
    assert answer.json() == json.loads(wanted.model_dump_json())


def test_series(advised: Server) -> None:
    """The noise scale over the run, at most so many points, up to the last step."""
    series = advised.get("/v1/runs/gpt/series?max_points=50").json()
    points = series["points"]
    assert 2 <= len(points) <= 50
    assert points[-1]["step"] == 2999
    steps = [point["step"] for point in points]
    assert steps == sorted(steps)
    part = advised.get("/v1/runs/gpt/series?from_step=1000&to_step=1999").json()["points"]
    assert part[0]["step"] >= 1000
    assert part[-1]["step"] == 1999
    assert advised.get("/v1/runs/gpt/series?max_points=100000").status == 422
    assert advised.get("/v1/runs/gpt/series?from_step=-1").status == 422


def test_list_of_runs(advised: Server) -> None:
    """Newest report first, filtered by name, limited."""
    listed = advised.get("/v1/runs?name_contains=resnet50&limit=10").json()["runs"]
    assert {run["run"] for run in listed} == {"resnet50-8gpu", "resnet50-4gpu"}
    assert listed[0]["last_report_at"] >= listed[1]["last_report_at"]
    assert advised.get("/v1/runs?name_contains=100%25").json()["runs"] == []
    assert len(advised.get("/v1/runs?limit=1").json()["runs"]) == 1
    assert advised.get("/v1/runs?limit=0").status == 422
