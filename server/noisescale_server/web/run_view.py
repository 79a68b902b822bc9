"""One run's page: what stands in it besides the charts."""

from dataclasses import dataclass

from noisescale.advice import NoiseScaleInterval, Recommendation
from noisescale.blocks import Geometry
from noisescale.estimate import Estimate
from noisescale.recommend import MATCHING_GEOMETRY
from noisescale.wire import RunInfo, RunSummary
from noisescale_server.services import Services
from noisescale_server.standing import Standing
from noisescale_server.store import StoredRun
from noisescale_server.summaries import summary_of
from noisescale_server.web.charts import geometry_keys, group_keys
from noisescale_server.web.promql import chart_queries
from noisescale_server.web.rule_rows import RuleRow, rule_rows
from noisescale_server.web.scale import Strip, strip_of
from noisescale_server.web.words import ratio_of, shown, shown_exactly


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything the template shows.

    Attributes:
        scale, geometry: The noise scale that the advice goes by.
        sentences: The explanation, one by one.
        fitting: The geometry that fits the run's optimizer.
        groups, geometries: Estimates for the small charts.
        about: What the job reported of itself, in words.
    """

    run: StoredRun
    summary: RunSummary
    info: RunInfo
    scale: NoiseScaleInterval | None
    geometry: Geometry
    phase: str
    advice: Recommendation | None
    strip: Strip | None
    ratio: str
    rules: list[RuleRow]
    sentences: list[str]
    fitting: str
    groups: list[Estimate]
    geometries: list[Estimate]
    about: list[tuple[str, str]]
    attempts: int
    dropped_blocks: int
    promql: dict[str, list[str]]


async def view_run(services: Services, run: StoredRun, standing: Standing) -> RunView:
    """Put a run's page together."""
    summary = summary_of(run, standing, services)
    advice = standing.recommendation
    attempts = await services.store.attempts(run.id)
    scale = advice.noise_scale if advice is not None else None
    geometry: Geometry = scale.geometry if scale is not None else "euclidean"
    groups = set(group_keys(standing.estimates, optimizer=run.info.optimizer))
    geometries = set(geometry_keys(standing.estimates))
    return RunView(
        run=run,
        summary=summary,
        info=run.info,
        scale=scale,
        geometry=geometry,
        phase=standing.phase,
        advice=advice,
        strip=strip_of(advice) if advice is not None else None,
        ratio=ratio_of(scale.value if scale else None, summary.global_batch_size),
        rules=rule_rows(advice),
        sentences=sentences_of(advice.explanation) if advice is not None else [],
        fitting=MATCHING_GEOMETRY.get(run.info.optimizer or "other", "euclidean"),
        groups=[e for e in standing.estimates if (e.group, e.geometry) in groups],
        geometries=[e for e in standing.estimates if (e.group, e.geometry) in geometries],
        about=_about(run.info),
        attempts=len(attempts),
        dropped_blocks=sum(dropped for _, dropped in attempts),
        promql=chart_queries(run.name, geometry=geometry, group_geometry=_geometry_of(groups)),
    )


def _geometry_of(keys: set[tuple[str, Geometry]]) -> Geometry:
    """The one that the layer groups are shown in."""
    return next((geometry for _, geometry in keys), "euclidean")


def sentences_of(explanation: str) -> list[str]:
    """An explanation's sentences: each ends in a full stop before a space and a capital letter."""
    found: list[str] = []
    rest = explanation
    while rest:
        end = next(
            (
                index + 1
                for index in range(len(rest) - 2)
                if rest[index : index + 2] == ". " and rest[index + 2].isupper()
            ),
            len(rest),
        )
        found.append(rest[:end].strip())
        rest = rest[end:].strip()
    return found


def _about(info: RunInfo) -> list[tuple[str, str]]:
    """What is known of the job, in reading order; what is not known is left out."""
    numbers: list[tuple[str, float | None]] = [
        ("Data-parallel ranks", info.dp_world_size),
        ("Micro-batch", info.micro_batch_size),
        ("Accumulation steps", info.accumulation_steps),
        ("Largest micro-batch", info.max_micro_batch_size),
        ("Momentum", info.momentum),
        ("β₁", info.beta1),
        ("β₂", info.beta2),
        ("ε", info.epsilon),
        ("Weight decay", info.weight_decay),
    ]
    found = [("Optimizer", info.optimizer_name or info.optimizer or "not reported")]
    found += [(name, shown_exactly(value)) for name, value in numbers if value is not None]
    if info.tuned is not None:
        rate, batch = shown(info.tuned.learning_rate), shown_exactly(info.tuned.global_batch_size)
        found.append(("Tuned learning rate", f"{rate} at a batch of {batch}"))
    if info.batch_norm is not None:
        found.append(("BatchNorm", "per rank" if info.batch_norm else "none"))
    if info.every is not None:
        found.append(("Measured", "every step" if info.every == 1 else f"every {info.every} steps"))
    if info.measured_share is not None:
        found.append(("Cost of measuring", f"{100 * info.measured_share:.2g}% of step time"))
    found += [(name, value) for name, value in sorted(info.versions.items())]
    found += [(name, value) for name, value in sorted(info.labels.items())]
    return found
