"""The PromQL that draws in Grafana what each chart draws here."""

from noisescale.blocks import TOTAL, Geometry
from noisescale.wire import RunSummary

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


def compare_query(runs: list[RunSummary]) -> str:
    """The noise scales of several runs."""
    names = "|".join(run.run.replace(".", r"\\.") for run in runs)
    return once("noisescale_noise_scale", f'run_id=~"{names}", geometry="euclidean", group="{TOTAL}"')
