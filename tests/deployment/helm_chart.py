"""Lints and renders a chart with Helm's own code, out of the wheel helm-python-sdk; run by lint.py.

python helm_chart.py render CHART VALUES_AS_JSON FILE
"""

import json
import sys
from pathlib import Path

import helm_python

WARNING = 2


def main() -> None:
    """Exit with the faults, or write the manifests."""
    _, chart, text, output = sys.argv[1:]
    values = json.loads(text)
    with helm_python.Chart.load(chart) as loaded:
        rendered = loaded.render(values, name="demo", namespace="training")
    found = helm_python.lint(chart, values, strict=True)
    faults = [f"{m['path']}: {m['error']}" for m in found["messages"] if m["severity"] >= WARNING]
    if faults:
        sys.exit("\n".join(faults))
    manifests = [text for name, text in sorted(rendered.items()) if name.endswith(".yaml")]
    Path(output).write_text("\n---\n".join(manifests))


if __name__ == "__main__":
    main()
