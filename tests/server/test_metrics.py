"""/metrics is what Prometheus wants, whatever the runs are like."""

import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.server.reports import report, some_blocks
from tests.services import Server, required_tool, running_server, wait_until

FAMILIES = {
    "noisescale_noise_scale": "gauge",
    "noisescale_noise_scale_lower": "gauge",
    "noisescale_noise_scale_upper": "gauge",
    "noisescale_trace_covariance": "gauge",
    "noisescale_true_grad_sq_norm": "gauge",
    "noisescale_global_batch_size": "gauge",
    "noisescale_local_batch_size": "gauge",
    "noisescale_learning_rate": "gauge",
    "noisescale_sample_efficiency_ratio": "gauge",
    "noisescale_recommended_batch_size": "gauge",
    "noisescale_recommended_learning_rate": "gauge",
    "noisescale_recommendation": "gauge",
    "noisescale_steps": "counter",
    "noisescale_examples": "counter",
    "noisescale_skipped_steps": "counter",
    "noisescale_last_report_timestamp_seconds": "gauge",
    "noisescale_run": "info",
}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]  # a generator
    """A server with a run of every kind."""
    with running_server(tmp_path_factory.mktemp("metrics")) as server:
        server.post("/v1/runs/known/blocks", report(some_blocks(600)))
        server.post("/v1/runs/short/blocks", report(some_blocks(10)))
        server.post("/v1/runs/empty/blocks", report())
        tuned = {"tuned": {"global_batch_size": 64, "learning_rate": 0.1}, "optimizer_name": 'S"\\\nGD'}
        server.post("/v1/runs/odd.name-1_2/blocks", report(some_blocks(300, seed=3), run=tuned))
        server.post("/v1/runs/ended/blocks", report(some_blocks(300, seed=4), ended=True))
        yield server


def families(server: Server, *, openmetrics: bool = False) -> dict[str, Metric]:
    """What a scrape gives, by prometheus_client's own parser."""
    answer = server.get("/metrics", Accept=OPENMETRICS if openmetrics else "text/plain")
    assert answer.status == 200
    assert ("openmetrics" in answer.headers["content-type"]) == openmetrics
    parse = parse_openmetrics if openmetrics else parse_text
    found = list(parse(answer.text))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


@pytest.mark.parametrize("openmetrics", [False, True])
def test_families_and_series(scraped: Server, openmetrics: bool) -> None:
    """All families are there, typed and with help; no series twice, no timestamps, no job or instance."""
    found = families(scraped, openmetrics=openmetrics)
    plain = {"noisescale_run_info": "gauge"} if not openmetrics else {"noisescale_run": "info"}
    wanted = {name: kind for name, kind in FAMILIES.items() if name != "noisescale_run"} | plain
    assert {name: family.type for name, family in found.items()} == wanted
    seen = set()
    for family in found.values():
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in seen
            seen.add(key)
            assert sample.timestamp is None
            assert not {"job", "instance"} & sample.labels.keys()
            assert sample.value == sample.value  # no NaN


def test_both_formats_hold_the_same(scraped: Server) -> None:
    """The text format and OpenMetrics have the same values."""
    text, openmetrics = families(scraped), families(scraped, openmetrics=True)

    def values(found: dict[str, Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in found.values()
            for sample in family.samples
        }

    assert values(text) == values(openmetrics)


def test_promtool_finds_no_fault(scraped: Server) -> None:
    """`promtool check metrics`, with its lint."""
    checked = subprocess.run(
        [required_tool("promtool"), "check", "metrics"],
        input=scraped.get("/metrics").body,
        capture_output=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    process = scraped.get("/metrics/process").body
    checked = subprocess.run(
        [required_tool("promtool"), "check", "metrics"], input=process, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_values_are_those_of_the_api(scraped: Server) -> None:
    """Every run's series say what /v1/runs and /recommend say; unknown values are absent."""
    found = families(scraped)

    def value(name: str, run: str) -> float | None:
        samples = [s.value for s in found[name].samples if s.labels["run_id"] == run]
        assert len(samples) <= 1
        return samples[0] if samples else None

    for run in ("known", "odd.name-1_2"):
        told = scraped.get(f"/v1/runs/{run}").json()
        advice = scraped.get(f"/recommend?run={run}").json()
        assert value("noisescale_noise_scale", run) == pytest.approx(told["noise_scale"])
        assert value("noisescale_noise_scale_lower", run) == pytest.approx(told["lower"])
        assert value("noisescale_noise_scale_upper", run) == (
            None if told["upper"] is None else pytest.approx(told["upper"])
        )
        assert value("noisescale_steps", run) == told["steps"]
        assert value("noisescale_examples", run) == told["examples"]
        assert value("noisescale_global_batch_size", run) == 64
        assert value("noisescale_local_batch_size", run) == 16
        assert value("noisescale_learning_rate", run) == pytest.approx(0.1)
        assert value("noisescale_recommended_batch_size", run) == advice["global_batch_size"]
        states = {
            s.labels["action"]: s.value
            for s in found["noisescale_recommendation"].samples
            if s.labels["run_id"] == run
        }
        assert [action for action, on in states.items() if on] == [advice["action"]]
        assert set(states) == {"raise", "lower", "hold", "lr_only"}
    assert value("noisescale_noise_scale", "empty") is None
    assert value("noisescale_steps", "empty") == 0


def test_runs_leave_after_the_grace_time(tmp_path: Path) -> None:
    """A run that stopped reporting, or ended, leaves /metrics and can still be asked for."""
    with running_server(tmp_path, grace_s=3) as server:
        server.post("/v1/runs/old/blocks", report(some_blocks(300)))
        server.post("/v1/runs/gone/blocks", report(some_blocks(300), ended=True))
        assert 'run_id="old"' in server.get("/metrics").text
        assert 'run_id="gone"' in server.get("/metrics").text

        def left() -> bool:
            server.post("/v1/runs/live/blocks", report(some_blocks(20)))
            text = server.get("/metrics").text
            return 'run_id="old"' not in text and 'run_id="gone"' not in text

        wait_until(left, what="the end of the grace time")
        assert 'run_id="live"' in server.get("/metrics").text
        assert server.get("/v1/runs/old").json()["state"] == "stale"
        assert server.get("/v1/runs/gone").json()["state"] == "ended"
        assert server.get("/recommend?run=old").status == 200
        server.post("/v1/runs/old/blocks", report(seq=1))
        assert 'run_id="old"' in server.get("/metrics").text


def test_last_report_is_a_time(scraped: Server) -> None:
    """Seconds since 1970, as `time() - noisescale_last_report_timestamp_seconds` in an alert needs it."""
    (sample,) = [
        s
        for s in families(scraped)["noisescale_last_report_timestamp_seconds"].samples
        if s.labels["run_id"] == "known"
    ]
    assert time.time() - 600 < sample.value <= time.time()
