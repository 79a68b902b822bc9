"""The PromQL that draws in Grafana what each chart draws here."""

from collections.abc import Sequence

from noisescale.blocks import TOTAL, Geometry

_REPLICAS = "instance, pod"
"""Every replica shows every run; a query that does not say `max without` these counts it once each."""


def once(metric: str, selector: str) -> str:
    """A metric, once for all replicas."""
    return f"max without ({_REPLICAS}) ({metric}{{{selector}}})"


def chart_queries(run: str, *, geometry: Geometry, group_geometry: Geometry) -> dict[str, list[str]]:
    """For each chart of a run's page, a query a line.

    Args:
        geometry: Of the whole model's noise scale.
        group_geometry: Of the layer groups'.
    """
    this = f'run_id="{run}"'
    whole = f'{this}, geometry="{geometry}", group="{TOTAL}"'
    return {
        "noise_scale": [
            once("noisescale_noise_scale", whole),
            once("noisescale_noise_scale_lower", whole),
            once("noisescale_noise_scale_upper", whole),
            once("noisescale_global_batch_size", this),
            once("noisescale_recommended_batch_size", this),
        ],
        "learning_rate": [
            once("noisescale_learning_rate", this),
            once("noisescale_recommended_learning_rate", this),
        ],
        "moments": [
            once("noisescale_trace_covariance", whole),
            once("noisescale_true_grad_sq_norm", whole),
        ],
        "efficiency": [once("noisescale_sample_efficiency_ratio", this)],
        "groups": [once("noisescale_noise_scale", f'{this}, geometry="{group_geometry}"')],
        "geometries": [once("noisescale_noise_scale", f'{this}, group="{TOTAL}"')],
    }


def compare_queries(runs: Sequence[tuple[str, Geometry]]) -> list[str]:
    """The noise scales of several runs, a query for each geometry among them, and their batches.

    Args:
        runs: Each run's name, and the geometry of the noise scale that its advice goes by.
    """
    names: dict[Geometry, list[str]] = {}
    for run, geometry in runs:
        names.setdefault(geometry, []).append(run)
    queries = [
        once("noisescale_noise_scale", f'{_any_of(found)}, geometry="{geometry}", group="{TOTAL}"')
        for geometry, found in names.items()
    ]
    return [*queries, once("noisescale_global_batch_size", _any_of([run for run, _ in runs]))]


def _any_of(runs: Sequence[str]) -> str:
    pattern = "|".join(run.replace(".", r"\\.") for run in runs)
    return f'run_id=~"{pattern}"'
