"""The scrape configuration, recording rules and alerts, by promtool and by a real server's metrics."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment.conftest import Stack
from tests.deployment.stack import DOCKER, READ_TOKEN
from tests.services import http, required_tool, wait_until

PROMETHEUS = DOCKER / "prometheus"
RULE_FILES = sorted((PROMETHEUS / "rules").glob("*.yml"))
TEST_FILES = sorted((PROMETHEUS / "tests").glob("*.yml"))
RULES: list[dict[str, Any]] = [
    rule
    for path in RULE_FILES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
# What a job reports of itself that the server keeps and does not expose yet; without them
# NoisescaleBlocksDropped is silent and NoisescaleRunSilent cannot tell a run that ended.
AWAITED = {"noisescale_dropped_blocks_total", "noisescale_run_ended"}
CASES = [case for path in TEST_FILES for case in yaml.safe_load(path.read_text())["tests"]]


def promtool(*arguments: str | Path) -> None:
    answer = subprocess.run(
        [required_tool("promtool"), *map(str, arguments)], check=False, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_rules_are_valid() -> None:
    """promtool accepts every rule file."""
    promtool("check", "rules", *RULE_FILES)


def test_the_configuration_is_valid() -> None:
    """promtool accepts the scrape configuration and finds the rules that it names."""
    promtool("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert [
        path for pattern in config["rule_files"] for path in sorted(PROMETHEUS.glob(pattern))
    ] == RULE_FILES


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.name)
def test_alerts_fire_and_do_not_fire(path: Path) -> None:
    """Every case under docker/prometheus/tests comes out as it says."""
    promtool("test", "rules", path)


def test_every_alert_has_a_case_of_each_kind() -> None:
    """No alert is without a case where it fires and one where it does not."""
    firing: set[str] = set()
    quiet: set[str] = set()
    for case in CASES:
        for test in case.get("promql_expr_test", []):
            if match := re.search(r'ALERTS\{alertname="(\w+)"', test["expr"]):
                (firing if test["exp_samples"] else quiet).add(match.group(1))
    assert firing == set(ALERTS)
    assert quiet == set(ALERTS)


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_says_what_to_do(name: str) -> None:
    """Every alert has a summary that names its subject, what it means, what to do, and how urgent it is."""
    alert = ALERTS[name]
    assert set(alert["annotations"]) == {"summary", "description", "action"}
    assert alert["labels"]["severity"] in ("info", "warning", "critical")
    assert "$labels" in alert["annotations"]["summary"] or name == "NoisescaleTargetMissing"


def test_alerts_name_alerts_that_exist() -> None:
    """An annotation that points to another alert points to one that there is."""
    named = set(re.findall(r"\bNoisescale[A-Z]\w+", "".join(str(a["annotations"]) for a in ALERTS.values())))
    assert named <= set(ALERTS)


def test_prometheus_loads_the_rules_and_evaluates_them_without_error(stack: Stack) -> None:
    """A real Prometheus evaluates every rule on a real server's metrics, each without an error."""

    def evaluated() -> list[dict[str, Any]] | None:
        groups = http("GET", f"{stack.prometheus.url}/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else None

    rules = wait_until(evaluated, what="an evaluation of every rule")
    assert len(rules) == len(RULES)
    assert [rule for rule in rules if rule["health"] != "ok"] == []


def test_a_healthy_run_and_server_raise_no_alarm(stack: Stack) -> None:
    """Nothing fires on a server that is well; what the runs' alerts wait for is at most pending."""
    assert stack.prometheus.query('ALERTS{alertstate="firing"}') == []


def test_recorded_numbers_are_those_of_the_server(stack: Stack) -> None:
    """The recorded ratio is the server's noise scale divided by the server's batch."""
    run = stack.server.get("/v1/runs/words", Authorization=f"Bearer {READ_TOKEN}").json()
    recorded = stack.prometheus.value('noisescale:noise_scale_per_batch:ratio{run_id="words"}')
    assert recorded == pytest.approx(run["noise_scale"] / run["global_batch_size"])


def test_rules_name_metrics_that_the_server_exposes(stack: Stack) -> None:
    """A rule on a metric that nobody exposes would be silent for ever."""
    exposed = {
        line.split("{")[0].split(" ")[0]
        for path in ("/metrics", "/metrics/process")
        for line in stack.server.get(path, Authorization=f"Bearer {READ_TOKEN}").text.splitlines()
        if not line.startswith("#")
    }
    named = {name for rule in RULES for name in re.findall(r"(?<![\w:])noisescale_\w+", rule["expr"])}
    assert named - exposed <= AWAITED
