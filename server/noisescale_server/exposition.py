"""Runs as Prometheus metrics: which families there are, and one run's samples in them.

No timestamps; a run that ended or stopped reporting is simply not there any more after the grace time. A
value that is not known is absent, never NaN. `families` is what prometheus_client is handed; `lines_of`
writes the same samples as it does, for one run, so that a run is not written anew at every scrape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from noisescale.advice import Action
from noisescale.rules import sample_efficiency
from noisescale_server.standing import Standing
from noisescale_server.store import StoredRun

ACTIONS: tuple[str, ...] = get_args(Action)

Live = Sequence[tuple[StoredRun, Standing]]
Sample = tuple[Mapping[str, str], float]
"""The labels beside run_id, and the value."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, as far as it does not depend on runs.

    Attributes:
        labels: Beside run_id; of an info they depend on the run.
        samples: Of one run.
    """

    name: str
    kind: Literal["gauge", "counter", "info"]
    help: str
    samples: Callable[[StoredRun, Standing], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def sample_name(self) -> str:
        """As it stands in a sample's line."""
        return self.name + {"gauge": "", "counter": "_total", "info": "_info"}[self.kind]


class RunsCollector:
    """Hands prometheus_client the runs that are live at one moment."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def collect(self) -> Iterator[Metric]:
        """Every family, in a fixed order."""
        return families(self._live)


def registry_of(live: Live) -> CollectorRegistry:
    """A registry that holds these runs and nothing else."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunsCollector(live))
    return registry


def families(live: Live) -> Iterator[Metric]:
    """The metric families with the samples of these runs."""
    for family in FAMILIES:
        labels = ("run_id", *family.labels)
        metric: GaugeMetricFamily | CounterMetricFamily | InfoMetricFamily
        if family.kind == "info":
            metric = InfoMetricFamily(family.name, family.help, labels=["run_id"])
        elif family.kind == "counter":
            metric = CounterMetricFamily(family.name, family.help, labels=labels)
        else:
            metric = GaugeMetricFamily(family.name, family.help, labels=labels)
        for run, standing in live:
            for found, value in family.samples(run, standing):
                if isinstance(metric, InfoMetricFamily):
                    metric.add_metric([run.name], dict(found))
                else:
                    metric.add_metric([run.name, *(found[label] for label in family.labels)], value)
        yield metric


def lines_of(run: StoredRun, standing: Standing) -> tuple[bytes, ...]:
    """One run's lines in each family, as prometheus_client writes them in either format."""
    return tuple(
        "".join(
            f"{family.sample_name}{{{_labelled(run.name, labels)}}} {_number(value)}\n"
            for labels, value in family.samples(run, standing)
        ).encode()
        for family in FAMILIES
    )


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # it has no types
    return text


def _labelled(run: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return f'run_id="{run}"'
    named = sorted([("run_id", run), *labels.items()])
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in named])


def _escaped(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _estimated(field: str) -> Callable[[StoredRun, Standing], Iterable[Sample]]:
    def samples(_: StoredRun, standing: Standing) -> Iterator[Sample]:
        for found in standing.estimates:
            value = getattr(found, field)
            if value is not None and found.measured_steps > 0:
                yield {"geometry": found.geometry, "group": found.group}, value

    return samples


def _known(
    value_of: Callable[[StoredRun, Standing], float | None],
) -> Callable[[StoredRun, Standing], Iterable[Sample]]:
    def samples(run: StoredRun, standing: Standing) -> Iterator[Sample]:
        value = value_of(run, standing)
        if value is not None:
            yield {}, value

    return samples


def _actions(_: StoredRun, standing: Standing) -> Iterator[Sample]:
    # Not prometheus_client's state set: that names the state's label after the family.
    advice = standing.recommendation
    if advice is not None:
        for action in ACTIONS:
            yield {"action": action}, float(action == advice.action)


def _local_batch_size(run: StoredRun, standing: Standing) -> float | None:
    ranks, batch = run.info.dp_world_size, standing.global_batch_size
    return None if ranks is None or batch is None else batch / ranks


def _efficiency(_: StoredRun, standing: Standing) -> float | None:
    total, batch = standing.total, standing.global_batch_size
    if total is None or total.noise_scale is None or total.noise_scale < 0 or batch is None:
        return None
    return sample_efficiency(global_batch_size=batch, noise_scale=total.noise_scale)


def _advised_batch_size(_: StoredRun, standing: Standing) -> float | None:
    return standing.recommendation.global_batch_size if standing.recommendation else None


def _advised_learning_rate(_: StoredRun, standing: Standing) -> float | None:
    return standing.recommendation.learning_rate if standing.recommendation else None


def _info(run: StoredRun, _: Standing) -> Iterator[Sample]:
    known = {
        "optimizer": run.info.optimizer,
        "optimizer_name": run.info.optimizer_name,
        "dp_world_size": run.info.dp_world_size,
        "loss_reduction": run.info.loss_reduction,
        **{f"version_{name}": value for name, value in sorted(run.info.versions.items())},
    }
    yield {_label(name): str(value) for name, value in known.items() if value is not None}, 1.0


def _label(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)


def _estimate_family(name: str, field: str, help_text: str) -> Family:
    return Family(f"noisescale_{name}", "gauge", help_text, _estimated(field), ("geometry", "group"))


def _gauge(name: str, help_text: str, value_of: Callable[[StoredRun, Standing], float | None]) -> Family:
    return Family(f"noisescale_{name}", "gauge", help_text, _known(value_of))


def _counter(name: str, help_text: str, value_of: Callable[[StoredRun, Standing], float]) -> Family:
    return Family(f"noisescale_{name}", "counter", help_text, _known(value_of))


FAMILIES = (
    _estimate_family(
        "noise_scale",
        "noise_scale",
        "Gradient noise scale tr(Sigma)/|G|^2 of the current regime, in examples or tokens; "
        "an order-of-magnitude proxy for the critical batch size.",
    ),
    _estimate_family("noise_scale_lower", "lower", "Lower end of the noise scale's 95% interval."),
    _estimate_family(
        "noise_scale_upper", "upper", "Upper end of the noise scale's 95% interval; absent while unbounded."
    ),
    _estimate_family(
        "trace_covariance",
        "trace_covariance",
        "tr(Sigma), the trace of the per-example gradient covariance.",
    ),
    _estimate_family(
        "true_grad_sq_norm",
        "true_grad_sq_norm",
        "Estimate of |G|^2, the squared norm of the true gradient; may be negative.",
    ),
    _gauge(
        "global_batch_size",
        "Batch of one optimizer step over all ranks and micro-batches, in examples or tokens.",
        lambda _, standing: standing.global_batch_size,
    ),
    _gauge(
        "local_batch_size",
        "Batch of one optimizer step on one rank, in examples or tokens.",
        _local_batch_size,
    ),
    _gauge(
        "learning_rate",
        "Learning rate of the optimizer's first parameter group.",
        lambda _, standing: standing.learning_rate,
    ),
    _gauge(
        "sample_efficiency_ratio",
        "Useful share of each example, B_noise/(B_noise + B), from 0 to 1.",
        _efficiency,
    ),
    _gauge(
        "recommended_batch_size",
        "Global batch that /recommend advises; the present one on a hold.",
        _advised_batch_size,
    ),
    _gauge(
        "recommended_learning_rate",
        "Learning rate that /recommend advises; the present one on a hold.",
        _advised_learning_rate,
    ),
    Family(
        "noisescale_recommendation",
        "gauge",
        "What /recommend advises: 1 for that action, 0 for the others.",
        _actions,
        ("action",),
    ),
    _counter("steps", "Optimizer steps reported.", lambda run, _: run.steps),
    _counter("examples", "Examples or tokens consumed over all ranks.", lambda run, _: run.examples),
    _counter(
        "skipped_steps",
        "Steps left out of the measurement for a non-finite gradient.",
        lambda run, _: run.skipped_steps,
    ),
    _gauge(
        "last_report_timestamp_seconds",
        "Unix time of the run's last report.",
        lambda run, _: run.last_report_at,
    ),
    Family("noisescale_run", "info", "What a run reported of itself and does not change.", _info),
)
"""Every family of /metrics, in the order in which they are shown."""
