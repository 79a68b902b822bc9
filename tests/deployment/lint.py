"""Checks everything under docker/ with the tools that know each format best.

    python -m tests.deployment.lint                       # puts the tools into build/deployment-tools
    python -m tests.deployment.lint --tools DIRECTORY     # or into one that outlives `make clean`

Needs Debian's prometheus for promtool, and PyPI and the npm registry the first time. What is checked:

- the dashboards, field by field, against the types of the Grafana they are made for and the one that
  compose.yaml runs;
- compose.yaml against the Compose specification's schema, and by dclint;
- the Helm chart by Helm's own linter, and what it renders, for several sets of values, against the schemas of
  Kubernetes and of the Prometheus operator;
- the example manifests against the schemas of Kubernetes;
- the Dockerfiles by hadolint, the unit by systemd-analyze where there is one, the scripts by their shells.

`test_lint.py` runs it all, and shows that each check finds a fault that was put there.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from tests.deployment.lint_chart import chart, examples
from tests.deployment.lint_dashboards import dashboards
from tests.deployment.lint_tools import DOCKER, ROOT, ToolError, Tools, run

TOOLS = ROOT / "build" / "deployment-tools"
DCLINT = "dclint@3.1.0"
CHECK_SCHEMA = """\
import json, sys, jsonschema
schema, document = (json.load(open(path)) for path in sys.argv[1:])
cls = jsonschema.validators.validator_for(schema)
faults = [f'{error.json_path}: {error.message}' for error in cls(schema).iter_errors(document)]
sys.exit('\\n'.join(faults) or 0)
"""


def compose(tools: Tools, docker: Path) -> Iterator[str]:
    """Check compose.yaml against the specification's JSON schema, and lint it."""
    folder = tools.npm("compose", DCLINT)
    schema = folder / "node_modules" / "dclint" / "schemas" / "compose.schema.json"
    document = tools.folder / "compose.json"
    document.write_text(json.dumps(yaml.safe_load((docker / "compose.yaml").read_text())))
    run([tools.python(), "-c", CHECK_SCHEMA, schema, document])
    yield "compose.yaml is what the Compose specification's schema describes"
    # Two services publish the same port, in profiles that exclude each other. The order of keys is ours.
    options = ["--quiet", "--disable-rule", "no-duplicate-exported-ports"]
    tools.node(folder, "dclint", docker / "compose.yaml", *options)
    yield "dclint finds no error in compose.yaml"


def dockerfiles(tools: Tools, docker: Path) -> Iterator[str]:
    """Lint the Dockerfiles, by all of hadolint's rules."""
    files = sorted(docker.glob("*Dockerfile"))
    tools.python()
    run([tools.bin / "hadolint", "--failure-threshold", "style", *files])
    yield f"hadolint finds nothing in {', '.join(path.name for path in files)}"


def scripts(_: Tools, docker: Path) -> Iterator[str]:
    """Have the shells parse the scripts."""
    for shell, path in (("sh", docker / "make-secrets.sh"), ("bash", docker / "examples" / "slurm.sh")):
        run([shell, "-n", path])
        yield f"{path.name} parses"


def unit(_: Tools, docker: Path) -> Iterator[str]:
    """Have systemd read the unit."""
    path = docker / "noisescale-server.service"
    if shutil.which("systemd-analyze") is None:
        yield f"{path.name} was not checked: there is no systemd-analyze here"
        return
    answer = subprocess.run(["systemd-analyze", "verify", path], check=False, capture_output=True, text=True)
    # The one fault it may find is that the server is not installed on this machine.
    faults = [line for line in answer.stderr.splitlines() if "is not executable: No such file" not in line]
    if faults:
        raise ToolError("\n".join(faults))
    yield f"systemd-analyze finds nothing in {path.name}"


Check = Callable[[Tools, Path], Iterator[str]]
CHECKS: tuple[Check, ...] = (dashboards, compose, chart, examples, dockerfiles, scripts, unit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, default=TOOLS)
    tools = Tools(parser.parse_args(arguments).tools.resolve())
    failed = 0
    for check in CHECKS:
        try:
            for line in check(tools, DOCKER):
                sys.stdout.write(f"{line}\n")
        except ToolError as error:
            failed += 1
            sys.stdout.write(f"FAULT in {check.__name__}:\n{error}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
