"""The metrics reference, from the families that the server exposes."""

from collections.abc import Iterator
from typing import Any

from noisescale_server.exposition import families
from noisescale_server.process_metrics import ProcessMetrics

SUFFIXES = {"counter": "_total", "info": "_info"}


def metrics(page: str) -> Iterator[str]:
    """Every family of `/metrics` ("runs"), or our own of `/metrics/process` ("process")."""
    yield from ("| metric | type | labels | is |", "|---|---|---|---|")
    for name, kind, labels, help_text in _runs() if page == "runs" else _process():
        full = name + SUFFIXES.get(kind, "")
        shown = " ".join(f"`{label}`" for label in labels)
        escaped = help_text.replace("|", "\\|")
        yield f"| `{full}` | {kind} | {shown} | {escaped} |"
    yield ""


Row = tuple[str, str, tuple[str, ...], str]


def _runs() -> Iterator[Row]:
    for family in families([]):
        yield family.name, family.type, _labels(family), family.documentation


def _process() -> Iterator[Row]:
    metrics = ProcessMetrics()
    labels = {found._name: _labels(found) for found in vars(metrics).values() if hasattr(found, "_name")}
    for family in metrics.registry.collect():
        if family.name.startswith("noisescale"):
            named = labels.get(family.name, ()) or tuple(
                family.samples[0].labels if family.type == "info" else ()
            )
            yield family.name, family.type, named, family.documentation


def _labels(metric: Any) -> tuple[str, ...]:
    """prometheus_client has no public name for them."""
    return tuple(metric._labelnames)
