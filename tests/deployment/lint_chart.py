"""The Helm chart, what it renders, and the example manifests, against Helm's and Kubernetes' own rules."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.lint_tools import DOCKER, ToolError, Tools, run
from tests.services import required_tool

KUBERNETES = "1.33"
OPERATOR = "monitoring.coreos.com"
RUN_HELM = Path(__file__).parent / "helm_chart.py"
CHECK_OPERATOR_KINDS = Path(__file__).parent / "operator_kinds.py"

VALUES: dict[str, dict[str, Any]] = {
    "sqlite": {"auth": {"existingSecret": "tokens"}},
    "open": {
        "auth": {"insecure": True},
        "persistence": {"existingClaim": "mine", "storageClassName": "fast"},
    },
    "everything": {
        "replicaCount": 3,
        "image": {"tag": "0.1.0", "pullSecrets": [{"name": "registry"}]},
        "auth": {"existingSecret": "tokens"},
        "database": {"existingSecret": "postgres"},
        "env": {"NOISESCALE_GRACE_S": 120},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"a": "b"},
            "tls": [{"secretName": "t", "hosts": ["noisescale.example.com"]}],
        },
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "ml"},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "serviceAccount": {"annotations": {"a": "b"}},
        "serviceMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "honorLabels": True,
            "relabelings": [{"targetLabel": "cluster", "replacement": "one"}],
            "metricRelabelings": [{"action": "labeldrop", "regex": "pod"}],
            "runs": False,
        },
        "scrapeConfig": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True, "annotations": {"folder": "noisescale"}},
        "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    },
}
REFUSED_VALUES: dict[str, dict[str, Any]] = {
    "two replicas on SQLite": {"replicaCount": 2, "auth": {"insecure": True}},
    "no tokens": {},
}


def chart(tools: Tools, docker: Path) -> Iterator[str]:
    """Lint the chart, render it, and check what it renders."""
    for name, values in VALUES.items():
        manifests = tools.folder / f"chart-{name}.yaml"
        render(tools, docker, values, manifests)
        kinds = kubernetes_validate(tools, manifests)
        yield f"the chart with values '{name}' renders {', '.join(kinds)}"
    yield from carried_along(tools.folder / "chart-everything.yaml")
    for name, values in REFUSED_VALUES.items():
        try:
            render(tools, docker, values, os.devnull)
        except ToolError as error:
            if "set " not in str(error):
                raise
            yield f"the chart refuses {name}, and says what to set"
        else:
            raise ToolError(f"the chart was to refuse {name}, and rendered it")


def render(tools: Tools, docker: Path, values: dict[str, Any], output: Path | str) -> None:
    """Have Helm lint the chart and write what it renders."""
    folder = docker / "helm" / "noisescale"
    run([tools.python(), RUN_HELM, "render", folder, json.dumps(values), output])


def carried_along(manifests: Path) -> Iterator[str]:
    """Check that the rules and dashboards that the chart renders are those under docker/, still."""
    documents = list(filter(None, yaml.safe_load_all(manifests.read_text())))
    (rules,) = (document for document in documents if document["kind"] == "PrometheusRule")
    here = [
        group
        for path in sorted((DOCKER / "prometheus" / "rules").glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    if rules["spec"]["groups"] != here:
        raise ToolError("the chart's PrometheusRule is not what docker/prometheus/rules says")
    rendered = manifests.with_name("chart-rules.yml")
    rendered.write_text(yaml.safe_dump(rules["spec"]))
    run([required_tool("promtool"), "check", "rules", rendered])
    boards = {
        Path(name).stem.removeprefix("noisescale-"): json.loads(text)
        for document in documents
        if document["kind"] == "ConfigMap"
        for name, text in document["data"].items()
    }
    files = (DOCKER / "grafana" / "dashboards").glob("*.json")
    if boards != {path.stem: json.loads(path.read_text()) for path in files}:
        raise ToolError("the chart's ConfigMaps are not the dashboards under docker/grafana/dashboards")
    yield "the chart's rules and dashboards are those under docker/"


def kubernetes_validate(tools: Tools, manifests: Path) -> list[str]:
    """Check manifests against Kubernetes' schemas, and the Prometheus operator's; the kinds in them.

    Both strictly: an unknown field is a fault. That as many were checked as there are is checked too:
    the validator answers 0 to a command line that makes it look at nothing.
    """
    documents = [document for document in yaml.safe_load_all(manifests.read_text()) if document]
    operator = [document for document in documents if OPERATOR in document["apiVersion"]]
    own = [document for document in documents if OPERATOR not in document["apiVersion"]]
    checked = manifests.with_suffix(".own.yaml")
    checked.write_text(yaml.safe_dump_all(own))
    command = [tools.python(), "-m", "kubernetes_validate", "--strict", "-k", KUBERNETES, checked]
    passed = run(command).count(" passed for resource ")
    if passed != len(own):
        raise ToolError(f"{passed} of {len(own)} resources of {checked.name} were checked")
    if operator:
        checked = manifests.with_suffix(".operator.json")
        checked.write_text(json.dumps(operator))
        run([tools.python(), CHECK_OPERATOR_KINDS, checked])
    return [document["kind"] for document in documents]


def examples(tools: Tools, docker: Path) -> Iterator[str]:
    """Check the example manifests."""
    copy = tools.folder / "kubernetes-job.yaml"
    copy.write_text((docker / "examples" / copy.name).read_text())
    yield f"{copy.name} holds {', '.join(kubernetes_validate(tools, copy))}"
