"""The dashboards: current, consistent, and every query of theirs answered by a real Prometheus."""

import json
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment.conftest import Stack
from tests.deployment.stack import DOCKER
from tests.services import http

BOARDS = {
    path.stem: json.loads(path.read_text()) for path in (DOCKER / "grafana" / "dashboards").glob("*.json")
}
PROVISIONED = yaml.safe_load(
    (DOCKER / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
)
# What Grafana puts in their place: for a range of half a minute, scraped every half second.
INTERVALS = {"$__rate_interval": "10s", "$__interval": "2s", "$__range": "30s"}
RUN_CHOSEN = {"fleet": ".*", "run": "digits"}


def queries(board: str) -> Iterator[tuple[str, str, bool]]:
    """Where it is, PromQL, and whether it asks for the moment alone."""
    for panel in BOARDS[board]["panels"]:
        for target in panel["targets"]:
            yield f"{board} / {panel['title']} / {target['refId']}", target["expr"], bool(target["instant"])
    for annotation in BOARDS[board].get("annotations", {}).get("list", []):
        assert annotation["expr"] == annotation["target"]["expr"]
        yield f"{board} / annotation {annotation['name']}", annotation["expr"], False


ALL_QUERIES = [query for board in sorted(BOARDS) for query in queries(board)]


def substituted(expr: str, *, run: str, instance: str) -> str:
    """The query as Grafana sends it."""
    for name, value in (INTERVALS | {"$run": run, "$instance": instance}).items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"a variable is left in {expr}"
    return expr


def answers(stack: Stack, expr: str, *, instant: bool) -> list[dict[str, Any]]:
    """Series that have values, over the last half minute or now."""
    if instant:
        return stack.prometheus.query(expr)
    now = time.time()
    parameters = {"query": expr, "start": now - 30, "end": now, "step": 0.5}
    answer = http("GET", f"{stack.prometheus.url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}")
    assert answer.status == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def test_the_json_is_what_the_python_writes() -> None:
    """The checked-in dashboards, and the chart's copies of them and of the rules, are current."""
    command = [sys.executable, str(DOCKER / "grafana" / "generate.py"), "--check"]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    assert answer.returncode == 0, f"{answer.stdout}{answer.stderr}run: python docker/grafana/generate.py"


@pytest.mark.parametrize(("where", "expr", "instant"), ALL_QUERIES, ids=[query[0] for query in ALL_QUERIES])
def test_every_query_has_data(stack: Stack, where: str, expr: str, instant: bool) -> None:
    """Each query of each panel and annotation, with its variables filled in, is answered with values."""
    board = where.split(" / ")[0]
    sent = substituted(expr, run=RUN_CHOSEN.get(board, ""), instance=f"127.0.0.1:{stack.server.port}")
    found = answers(stack, sent, instant=instant)
    values = [float(v) for s in found for _, v in (s.get("values") or [s["value"]])]
    assert values, f"{where} shows nothing: {sent}"
    assert not any(value != value for value in values[-1:]), f"{where} ends with NaN: {sent}"


def test_the_variables_have_values(stack: Stack) -> None:
    """Each variable's label_values finds what the dashboards are about."""
    found = {}
    for name, board in BOARDS.items():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
                assert match, variable["query"]
                metric, label = match.groups()
                found[name] = {
                    s["metric"][label] for s in stack.prometheus.query(f"count by ({label}) ({metric})")
                }
    here = f"127.0.0.1:{stack.server.port}"
    assert found == {"fleet": {"digits", "words"}, "run": {"digits", "words"}, "service": {here}}


def test_a_run_counts_once_whatever_the_number_of_replicas(stack: Stack) -> None:
    """Aggregations leave out what tells replicas apart, so no table has a run twice."""
    for _, expr, instant in queries("fleet"):
        if instant and expr.startswith("max by (run_id)"):
            sent = substituted(expr, run=".*", instance="")
            runs = [series["metric"]["run_id"] for series in answers(stack, sent, instant=True)]
            assert sorted(runs) == sorted(set(runs))


def test_the_advice_is_shown_as_the_server_gives_it(stack: Stack) -> None:
    """The number behind the coloured word is the action that /recommend answers."""
    (panel,) = (p for p in BOARDS["run"]["panels"] if p["title"] == "Advice")
    shown = stack.prometheus.value(substituted(panel["targets"][0]["expr"], run="digits", instance=""))
    words = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    advice = stack.server.get("/recommend?run=digits", Authorization="Bearer read-token").json()
    expected = {
        "hold": "hold",
        "raise": "raise the batch",
        "lower": "lower the batch",
        "lr_only": "fix the learning",
    }
    assert shown is not None
    assert words[str(int(shown))]["text"].startswith(expected[advice["action"]])


def test_panels_and_boards_are_told_apart() -> None:
    """Uids, panel ids, and query letters are unique; the links between dashboards lead somewhere."""
    uids = [board["uid"] for board in BOARDS.values()]
    assert len(set(uids)) == len(BOARDS) == 3
    for name, board in BOARDS.items():
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        for panel in board["panels"]:
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs), (name, panel["title"])
            assert panel["description"], f"{name} / {panel['title']} does not say what it shows"
    linked = set(re.findall(r"/d/([\w-]+)\?", json.dumps(list(BOARDS.values()))))
    assert linked == {"noisescale-run"}
    assert linked <= set(uids)


def test_panels_do_not_overlap() -> None:
    """On Grafana's grid of 24 columns no two panels share a cell, and none sticks out."""
    for name, board in BOARDS.items():
        taken: dict[tuple[int, int], str] = {}
        for panel in board["panels"]:
            grid = panel["gridPos"]
            assert grid.get("x", 0) + grid["w"] <= 24, (name, panel["title"])
            for x in range(grid.get("x", 0), grid.get("x", 0) + grid["w"]):
                for y in range(grid.get("y", 0), grid.get("y", 0) + grid["h"]):
                    other = taken.setdefault((x, y), panel["title"])
                    assert other == panel["title"], f"{name}: {panel['title']} lies on {other}"


def test_the_provisioned_datasource_is_the_dashboards_first_choice() -> None:
    """The uid that provisioning gives is the one that every dashboard's datasource variable starts with."""
    (datasource,) = PROVISIONED["datasources"]
    for board in BOARDS.values():
        variable = board["templating"]["list"][0]
        assert variable["current"]["value"] == datasource["uid"]
        assert variable["query"] == datasource["type"]
        for panel in board["panels"]:
            assert panel["datasource"]["uid"] == "${datasource}"


def test_provisioned_folders_hold_the_dashboards() -> None:
    """Grafana is told to read the folder that compose.yaml mounts the dashboards at."""
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/noisescale.yml").read_text())[
        "providers"
    ][0]
    mounts = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
    inside = Path(provider["options"]["path"])
    assert f"./grafana/dashboards:{inside}:ro" in mounts
