"""Up to five runs beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from noisescale.advice import NoiseScaleInterval, Recommendation
from noisescale.wire import RunInfo, RunSummary
from noisescale_server.errors import UnknownRunError
from noisescale_server.services import Services
from noisescale_server.summaries import summary_of
from noisescale_server.web.promql import compare_queries
from noisescale_server.web.words import ratio_of

MOST_COMPARED = 5


@dataclass(frozen=True, slots=True)
class Compared:
    """One run's column."""

    summary: RunSummary
    info: RunInfo
    scale: NoiseScaleInterval | None
    advice: Recommendation | None
    steps: int
    examples: int
    ratio: str


@dataclass(frozen=True, slots=True)
class CompareView:
    """The page.

    Attributes:
        unknown: Names asked for that no run has.
        left_out: Names beyond the most that are compared.
        others: Runs that could be added.
    """

    runs: list[Compared]
    unknown: list[str]
    left_out: list[str]
    others: list[str]
    promql: list[str]

    @property
    def mixed_units(self) -> bool:
        """Whether some count examples and others tokens, so that one axis cannot hold both."""
        return len({run.summary.batch_unit for run in self.runs}) > 1


async def compare_runs(services: Services, names: Sequence[str]) -> CompareView:
    """The first five of the runs that are named, in that order."""
    wanted = list(dict.fromkeys(names))
    compared: list[Compared] = []
    unknown: list[str] = []
    for name in wanted[:MOST_COMPARED]:
        try:
            run = await services.store.run(name)
        except UnknownRunError:
            unknown.append(name)
            continue
        standing = await services.standings.of(run)
        summary = summary_of(run, standing, services)
        scale = standing.recommendation.noise_scale if standing.recommendation else None
        compared.append(
            Compared(
                summary=summary,
                info=run.info,
                scale=scale,
                advice=standing.recommendation,
                steps=run.steps,
                examples=run.examples,
                ratio=ratio_of(scale.value if scale else None, summary.global_batch_size),
            )
        )
    recent = [run.name for run in await services.store.runs(limit=50)]
    return CompareView(
        runs=compared,
        unknown=unknown,
        left_out=wanted[MOST_COMPARED:],
        others=[name for name in recent if name not in wanted],
        promql=compare_queries(
            [(run.summary.run, run.scale.geometry if run.scale else "euclidean") for run in compared]
        ),
    )
