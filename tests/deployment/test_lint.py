"""Every linter finds nothing in docker/, and finds a fault that was put there."""

import shutil
from pathlib import Path

import pytest

from tests.deployment.lint import CHECKS, TOOLS, Check, compose, dockerfiles, scripts, unit
from tests.deployment.lint_chart import chart, examples
from tests.deployment.lint_dashboards import dashboards
from tests.deployment.lint_tools import DOCKER, ToolError, Tools
from tests.services import required_tool

# The first run installs the linters: a minute, more on a busy machine.
pytestmark = pytest.mark.timeout(900)

TEMPLATES = "helm/noisescale/templates"
# Who must find it, where, what is replaced by what, and what the finder says.
FAULTS: dict[str, tuple[Check, str, str, str, str]] = {
    "a panel option that its type does not have": (
        dashboards, "grafana/dashboards/fleet.json", '"graphMode": "none"', '"graphMode": "nothing"',
        "Type '\"nothing\"' is not assignable",
    ),
    "a dashboard field of the wrong type": (
        dashboards, "grafana/dashboards/run.json", '"graphTooltip": 1', '"graphTooltip": "yes"',
        "'DashboardCursorSync",
    ),
    "a word that compose does not know": (
        compose, "compose.yaml", "restart: unless-stopped", "restrat: unless-stopped", "'restrat'",
    ),
    "an image without a tag": (
        compose, "compose.yaml", "prom/prometheus:v3.7.3", "prom/prometheus", "service-image-require",
    ),
    "a chart without a version": (
        chart, "helm/noisescale/Chart.yaml", "version: 0.1.0\n", "", "version",
    ),
    "a template that does not parse": (
        chart, f"{TEMPLATES}/deployment.yaml", "{{ .Values.replicaCount }}", "{{ .Values.replicaCount ",
        "deployment.yaml",
    ),
    "a field that a pod does not have": (
        chart, f"{TEMPLATES}/deployment.yaml", "failureThreshold: 30", "failureTreshold: 30",
        "failureTreshold",
    ),
    "a field that a ServiceMonitor does not have": (
        chart, f"{TEMPLATES}/monitors.yaml", "honorLabels:", "honourLabels:", "honourLabels",
    ),
    "a duration that Prometheus does not know": (
        chart, f"{TEMPLATES}/monitors.yaml", "scrapeInterval: {{ .Values.scrapeConfig.interval }}",
        "scrapeInterval: 5 minutes", "scrapeInterval",
    ),
    "a chart that lets two replicas share a file": (
        chart, f"{TEMPLATES}/deployment.yaml", '{{- include "noisescale.check" . }}\n', "",
        "was to refuse two replicas",
    ),
    "rules in the chart that are not those beside it": (
        chart, "helm/noisescale/files/rules/runs.yml", "severity: warning", "severity: info",
        "not what docker/prometheus/rules says",
    ),
    "an example with a word for a number": (
        examples, "examples/kubernetes-job.yaml", "backoffLimit: 4", "backoffLimit: four", "backoffLimit",
    ),
    "packages installed at any version": (
        dockerfiles, "Dockerfile", "# hadolint ignore=DL3008\n", "", "DL3008",
    ),
    "a script that does not parse": (scripts, "make-secrets.sh", "make() {", "make( {", "make-secrets.sh"),
    "a job script that does not parse": (scripts, "examples/slurm.sh", "$(scontrol", "$((scontrol", "slurm"),
    "a unit with a word for a number": (
        unit, "noisescale-server.service", "RestartSec=2", "RestartSec=soon",
        "Failed to parse sec value",
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def tools() -> Tools:
    """The linters, installed."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    found = Tools(TOOLS)
    found.python()
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nothing_is_found(tools: Tools, check: Check) -> None:
    """The files under docker/ are as their formats' own tools want them."""
    if check is unit:
        required_tool("systemd-analyze")
    assert list(check(tools, DOCKER))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(tools: Tools, tmp_path: Path, fault: str) -> None:
    """A copy of docker/ with one fault in it does not pass, and the tool's words name the fault."""
    check, name, old, new, words = FAULTS[fault]
    if check is unit:
        required_tool("systemd-analyze")
    docker = tmp_path / "docker"
    shutil.copytree(DOCKER, docker, ignore=shutil.ignore_patterns("secrets"))
    text = (docker / name).read_text()
    assert old in text
    (docker / name).write_text(text.replace(old, new))
    with pytest.raises(ToolError) as found:
        list(check(tools, docker))
    assert words in str(found.value)


def test_every_check_has_a_fault_to_find() -> None:
    """No check is left without a proof that it can fail."""
    assert {check for check, *_ in FAULTS.values()} == set(CHECKS)
