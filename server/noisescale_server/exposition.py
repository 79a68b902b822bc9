"""Runs as Prometheus metrics, at /metrics.

One family at a time with all runs' samples in it, as the format wants. No timestamps; a run that
ended or stopped reporting is simply not there any more after the grace time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)

from noisescale.advice import Action
from noisescale.rules import sample_efficiency
from noisescale_server.standing import Standing
from noisescale_server.store import StoredRun

ACTIONS: tuple[str, ...] = get_args(Action)
_ESTIMATE_LABELS = ("run_id", "geometry", "group")

Live = Sequence[tuple[StoredRun, Standing]]


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
    """The runs' metric families. A value that is not known is absent, never NaN."""
    yield from _estimates(live)
    yield from _settings(live)
    yield from _advice(live)
    yield from _totals(live)
    info = InfoMetricFamily(
        "noisescale_run", "What a run reported of itself and does not change.", labels=["run_id"]
    )
    for run, _ in live:
        info.add_metric([run.name], _info(run))
    yield info


def _estimates(live: Live) -> Iterator[Metric]:
    fields = {
        "noise_scale": "Gradient noise scale tr(Sigma)/|G|^2 of the current regime, in examples or tokens; "
        "an order-of-magnitude proxy for the critical batch size.",
        "lower": "Lower end of the noise scale's 95% interval.",
        "upper": "Upper end of the noise scale's 95% interval; absent while unbounded.",
        "trace_covariance": "tr(Sigma), the trace of the per-example gradient covariance.",
        "true_grad_sq_norm": "Estimate of |G|^2, the squared norm of the true gradient; may be negative.",
    }
    for field, help_text in fields.items():
        name = f"noise_scale_{field}" if field in ("lower", "upper") else field
        family = GaugeMetricFamily(f"noisescale_{name}", help_text, labels=_ESTIMATE_LABELS)
        for run, standing in live:
            for found in standing.estimates:
                value = getattr(found, field)
                if value is not None and found.measured_steps > 0:
                    family.add_metric([run.name, found.geometry, found.group], value)
        yield family


def _settings(live: Live) -> Iterator[Metric]:
    yield _gauge(
        "noisescale_global_batch_size",
        "Batch of one optimizer step over all ranks and micro-batches, in examples or tokens.",
        ((run.name, standing.global_batch_size) for run, standing in live),
    )
    yield _gauge(
        "noisescale_local_batch_size",
        "Batch of one optimizer step on one rank, in examples or tokens.",
        ((run.name, _local_batch_size(run, standing)) for run, standing in live),
    )
    yield _gauge(
        "noisescale_learning_rate",
        "Learning rate of the optimizer's first parameter group.",
        ((run.name, standing.learning_rate) for run, standing in live),
    )


def _advice(live: Live) -> Iterator[Metric]:
    yield _gauge(
        "noisescale_sample_efficiency_ratio",
        "Useful share of each example, B_noise/(B_noise + B), from 0 to 1.",
        ((run.name, _efficiency(standing)) for run, standing in live),
    )
    advised = [(run.name, standing.recommendation) for run, standing in live]
    yield _gauge(
        "noisescale_recommended_batch_size",
        "Global batch that /recommend advises; the present one on a hold.",
        ((name, advice.global_batch_size if advice else None) for name, advice in advised),
    )
    yield _gauge(
        "noisescale_recommended_learning_rate",
        "Learning rate that /recommend advises; the present one on a hold.",
        ((name, advice.learning_rate if advice else None) for name, advice in advised),
    )
    # Not prometheus_client's StateSetMetricFamily: that names the state's label after the family.
    states = GaugeMetricFamily(
        "noisescale_recommendation",
        "What /recommend advises: 1 for that action, 0 for the others.",
        labels=["run_id", "action"],
    )
    for name, advice in advised:
        if advice is not None:
            for action in ACTIONS:
                states.add_metric([name, action], float(action == advice.action))
    yield states


def _totals(live: Live) -> Iterator[Metric]:
    for field, help_text in {
        "steps": "Optimizer steps reported.",
        "examples": "Examples or tokens consumed over all ranks.",
        "skipped_steps": "Steps left out of the measurement for a non-finite gradient.",
    }.items():
        family = CounterMetricFamily(f"noisescale_{field}", help_text, labels=["run_id"])
        for run, _ in live:
            family.add_metric([run.name], getattr(run, field))
        yield family
    yield _gauge(
        "noisescale_last_report_timestamp_seconds",
        "Unix time of the run's last report.",
        ((run.name, run.last_report_at) for run, _ in live),
    )


def _gauge(name: str, help_text: str, values: Iterable[tuple[str, float | None]]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=["run_id"])
    for run, value in values:
        if value is not None:
            family.add_metric([run], value)
    return family


def _local_batch_size(run: StoredRun, standing: Standing) -> float | None:
    ranks, batch = run.info.dp_world_size, standing.global_batch_size
    return None if ranks is None or batch is None else batch / ranks


def _efficiency(standing: Standing) -> float | None:
    total, batch = standing.total, standing.global_batch_size
    if total is None or total.noise_scale is None or total.noise_scale < 0 or batch is None:
        return None
    return sample_efficiency(global_batch_size=batch, noise_scale=total.noise_scale)


def _info(run: StoredRun) -> dict[str, str]:
    known = {
        "optimizer": run.info.optimizer,
        "optimizer_name": run.info.optimizer_name,
        "dp_world_size": run.info.dp_world_size,
        "loss_reduction": run.info.loss_reduction,
        **{f"version_{name}": value for name, value in sorted(run.info.versions.items())},
    }
    return {_label(name): str(value) for name, value in known.items() if value is not None}


def _label(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
