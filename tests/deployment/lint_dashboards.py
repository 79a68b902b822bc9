"""The dashboards against Grafana's own published types, compiled by TypeScript."""

import json
from collections.abc import Iterator
from pathlib import Path

from tests.deployment.lint_tools import Tools

TYPESCRIPT = "typescript@5.9.3"
# The bindings' version, and that of the image in compose.yaml.
GRAFANA_SCHEMAS = {"11.6.0": "dist/esm", "12.2.1": "dist/types"}
PANEL_TYPES = {
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.d.ts",
    "table": "table/panelcfg/x/TablePanelCfg_types.gen.d.ts",
    "stat": "stat/panelcfg/x/StatPanelCfg_types.gen.d.ts",
    "state-timeline": "statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.d.ts",
}
# Read by the Prometheus datasource of Grafana; the dashboard's types do not know them.
ANNOTATION_EXTRAS = ("expr", "titleFormat")
COMPILE = ("--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler")  # noqa: E501  one command line  # fmt: skip
# JSON has no enums: a string enum is written as its value.
JSON_TYPES = """\
type Json<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : unknown extends T ? T : T extends (infer E)[] ? Json<E>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;"""


def dashboards(tools: Tools, docker: Path) -> Iterator[str]:
    """Check every dashboard against Grafana's published types."""
    boards = sorted((docker / "grafana" / "dashboards").glob("*.json"))
    for version, types in GRAFANA_SCHEMAS.items():
        folder = tools.npm(f"grafana-{version}", f"@grafana/schema@{version}", TYPESCRIPT)
        (folder / "check.ts").write_text(program(boards, types))
        tools.node(folder, "tsc", *COMPILE, "check.ts")
        yield f"{len(boards)} dashboards are what @grafana/schema {version} describes"


def program(boards: list[Path], types: str) -> str:
    """A program that compiles if the dashboards, and their panels' options and fields, have the types."""
    lines = ["import type { Dashboard } from '@grafana/schema';"]
    for kind, path in PANEL_TYPES.items():
        module = f"@grafana/schema/{types}/raw/composable/{path}"
        lines.append(f"import type * as {identifier(kind)} from '{module}';")
    lines.append(JSON_TYPES)
    for file in boards:
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
                fields = json.dumps(custom)
                lines.append(f"export const {name}_f: Json<Partial<{kind}.FieldConfig>> = {fields};")
    return "\n".join(lines) + "\n"


def identifier(kind: str) -> str:
    """A panel's type as a name in TypeScript."""
    return kind.replace("-", "_")
