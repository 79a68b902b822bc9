"""Writes the dashboards as JSON, for Grafana's provisioning and into the Helm chart.

python docker/grafana/generate.py            # writes what changed
python docker/grafana/generate.py --check    # writes nothing; exits 1 where one is not current
"""

import argparse
import json
import sys
from pathlib import Path

import fleet
import run
import service
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

DOCKER = Path(__file__).parent.parent
FOLDERS = (DOCKER / "grafana" / "dashboards", DOCKER / "helm" / "noisescale" / "files" / "dashboards")
BOARDS = {"fleet": fleet.build, "run": run.build, "service": service.build}
RULES = DOCKER / "prometheus" / "rules"
CHART_RULES = DOCKER / "helm" / "noisescale" / "files" / "rules"


def as_json(board: dashboard.Dashboard) -> str:
    """The dashboard as Grafana reads it, with panels numbered in their order."""
    built = board.build()
    for number, panel in enumerate(built.panels or [], start=1):
        panel.id_val = number
    plain = json.loads(json.dumps(built, cls=JSONEncoder))
    for variable in plain["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):  # the SDK writes an interval variable's for all kinds
            variable.pop(key, None)
    for panel in plain["panels"]:
        panel["options"].pop("footer", None)  # the SDK writes an empty one; Grafana 12 has none
    return json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def wanted() -> dict[Path, str]:
    """Every generated file with its content; the chart has copies, as Helm reads no file outside it."""
    files = {
        folder / f"{name}.json": as_json(build()) for name, build in BOARDS.items() for folder in FOLDERS
    }
    return files | {CHART_RULES / path.name: path.read_text() for path in sorted(RULES.glob("*.yml"))}


def main() -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a file is not current")
    check = parser.parse_args().check
    stale = [path for path, content in wanted().items() if not path.exists() or path.read_text() != content]
    for path in stale:
        sys.stdout.write(f"{'not current' if check else 'written'}: {path.relative_to(DOCKER.parent)}\n")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted()[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
