"""What the charts of a run draw, as columns for the script: nothing is worked out in the browser."""

from collections.abc import Sequence

from pydantic import BaseModel

from noisescale.advice import NoiseScaleInterval, Recommendation
from noisescale.blocks import TOTAL, Geometry
from noisescale.estimate import Estimate
from noisescale.recommend import MATCHING_GEOMETRY
from noisescale.rules import examples_over_minimum, steps_over_minimum
from noisescale.wire import OptimizerFamily
from noisescale_server.web.history import MOST_CHANGES, Change, Drawn, History, Stretch

RUN_POINTS = 700
SMALL_POINTS = 48
_ALL_SMALL_POINTS = 2000
_CURVE_POINTS = 81


class Columns(BaseModel):
    """One value a point in each; None where there is none.

    Attributes:
        step, examples: Taken and consumed up to the point.
        upper: None where the interval has no upper end.
    """

    step: list[int]
    examples: list[int]
    noise_scale: list[float | None]
    lower: list[float | None]
    upper: list[float | None]
    trace_covariance: list[float | None]
    true_grad_sq_norm: list[float | None]
    global_batch_size: list[float | None]
    learning_rate: list[float | None]


class Spot(BaseModel):
    """A batch on the efficiency curve."""

    global_batch_size: float
    examples: float
    steps: float


class Curve(BaseModel):
    """Steps against examples for the same progress, each over the least there can be.

    Attributes:
        noise_scale: At which it is drawn.
        line: From small batches to big ones.
        now, then: Where the run is, and where another batch would take it.
        range: Where it may be for all the interval says.
    """

    noise_scale: float
    line: list[Spot]
    now: Spot
    then: Spot | None
    range: list[Spot]


class Charts(BaseModel):
    """Everything that is drawn of a run, but for the small multiples.

    Attributes:
        recommended_batch_size: None where none is advised but the present one.
        limits: Between which the noise scale is drawn.
    """

    run: str
    version: int
    batch_unit: str
    geometry: str
    points: Columns
    stretches: list[Stretch]
    changes: list[Change]
    changes_left_out: int
    action: str | None
    global_batch_size: float | None
    recommended_batch_size: float | None
    limits: tuple[float, float] | None
    curve: Curve | None


class Multiple(BaseModel):
    """One small chart."""

    name: str
    points: Columns
    limits: tuple[float, float] | None


def charts_of(
    history: History,
    *,
    run: str,
    version: int,
    advice: Recommendation | None,
    restarts: Sequence[tuple[int, int]] = (),
    max_points: int = RUN_POINTS,
) -> Charts:
    """The charts of the whole model."""
    changes = history.changes(restarts)
    target = advice.global_batch_size if advice and advice.action in ("raise", "lower") else None
    geometry: Geometry = advice.noise_scale.geometry if advice else "euclidean"
    points = columns(history, history.drawn(max_points=max_points, geometry=geometry, every_column=True))
    return Charts(
        run=run,
        version=version,
        batch_unit=history.blocks[-1].batch_unit if history.blocks else "examples",
        geometry=geometry,
        points=points,
        stretches=history.stretches()[-MOST_CHANGES:],
        changes=changes[-MOST_CHANGES:],
        changes_left_out=max(0, len(changes) - MOST_CHANGES),
        action=advice.action if advice else None,
        global_batch_size=advice.global_batch_size_now if advice else None,
        recommended_batch_size=target,
        limits=limits_of([points], marks=[target] if target else []),
        curve=curve_of(advice.noise_scale, now=advice.global_batch_size_now, then=target) if advice else None,
    )


def multiples_of(history: History, keys: Sequence[tuple[str, Geometry]], *, by: str) -> list[Multiple]:
    """Small charts of layer groups or geometries.

    Args:
        by: "group" or "geometry": what names each.
    """
    points = max(12, min(SMALL_POINTS, _ALL_SMALL_POINTS // max(1, len(keys))))
    drawn = [
        columns(history, history.drawn(max_points=points, group=group, geometry=geometry))
        for group, geometry in keys
    ]
    limits = limits_of(drawn)  # one scale for all, so that they can be compared
    return [
        Multiple(name=group if by == "group" else geometry, points=columns_, limits=limits)
        for (group, geometry), columns_ in zip(keys, drawn, strict=True)
    ]


def group_keys(
    estimates: Sequence[Estimate], *, optimizer: OptimizerFamily | None
) -> list[tuple[str, Geometry]]:
    """The layer groups, in the geometry that fits the optimizer where they were measured in it."""
    fitting = MATCHING_GEOMETRY.get(optimizer or "other", "euclidean")
    parts = [e for e in estimates if e.group != TOTAL]
    geometry = fitting if any(e.geometry == fitting for e in parts) else "euclidean"
    return [(e.group, e.geometry) for e in parts if e.geometry == geometry]


def geometry_keys(estimates: Sequence[Estimate]) -> list[tuple[str, Geometry]]:
    """The whole model in every geometry that was measured."""
    return [(e.group, e.geometry) for e in estimates if e.group == TOTAL]


def curve_of(scale: NoiseScaleInterval, *, now: float, then: float | None = None) -> Curve | None:
    """The efficiency curve; None where the noise scale is not bounded from below.

    Args:
        now, then: Batches; `then` is marked too.
    """
    point = scale.value if scale.value is not None and scale.upper is not None else scale.lower
    if not point > 0:
        return None
    sizes = [now, point, *([then] if then else [])]
    low, high = min(sizes) / 4, max(sizes) * 4
    ratio = (high / low) ** (1 / (_CURVE_POINTS - 1))
    ends = [end for end in (scale.lower, scale.upper) if end]
    return Curve(
        noise_scale=point,
        line=[_spot(low * ratio**i, point) for i in range(_CURVE_POINTS)],
        now=_spot(now, point),
        then=_spot(then, point) if then else None,
        range=[_spot(now, end) for end in ends] if len(ends) == 2 else [],
    )


def columns(history: History, drawn: Drawn) -> Columns:
    """Estimates as columns, with seven figures."""
    blocks = [history.blocks[index] for index in drawn.indices]
    return Columns(
        step=[block.last_step + 1 for block in blocks],
        examples=[history.examples[index] for index in drawn.indices],
        noise_scale=[_short(e.noise_scale) for e in drawn.estimates],
        lower=[_short(e.lower) for e in drawn.estimates],
        upper=[_short(e.upper) for e in drawn.estimates],
        trace_covariance=[_short(e.trace_covariance) for e in drawn.estimates],
        true_grad_sq_norm=[_short(e.true_grad_sq_norm) for e in drawn.estimates],
        global_batch_size=[_short(block.global_batch_size) for block in blocks],
        learning_rate=[_short(block.learning_rate) for block in blocks],
    )


def limits_of(series: Sequence[Columns], *, marks: Sequence[float] = ()) -> tuple[float, float] | None:
    """The least and the most that a chart of noise scales shows; None where there is nothing positive.

    Batches, marks, settled estimates and the latest one are always inside. Ends of intervals are
    where they are near: one early, hardly bounded interval must not press everything else flat.
    """
    firm = list(marks)
    ends: list[float] = []
    for points in series:
        bounded = zip(points.noise_scale, points.lower, points.upper, strict=True)
        firm += [size for size in points.global_batch_size if size]
        for value, lower, upper in bounded:
            if value is not None and value > 0 and upper is not None:
                firm.append(value)
            ends += [end for end in (value, lower, upper) if end is not None and end > 0]
        latest = [(v, low) for v, low in zip(points.noise_scale, points.lower, strict=True) if v and v > 0]
        if latest:
            value, lower = latest[-1]
            firm.append(min(value, 16 * lower) if lower else value)
    if not firm and not ends:
        return None
    firm = firm or ends
    lowest = max(min([*firm, *ends]), min(firm) / 4)
    highest = min(max([*firm, *ends]), 4 * max(firm))
    return lowest / 1.5, highest * 1.5


def _spot(batch: float, noise_scale: float) -> Spot:
    return Spot(
        global_batch_size=batch,
        examples=examples_over_minimum(global_batch_size=batch, noise_scale=noise_scale),
        steps=steps_over_minimum(global_batch_size=batch, noise_scale=noise_scale),
    )


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")
