"""Blocks to a noise scale with its interval.

The noise scale is the ratio of the averages of tr(Sigma) and |G|^2, and nearly all of its
error is in |G|^2. The interval is Fieller's, on the covariance between groups of blocks: it
answers "unbounded above" when |G|^2 is not significantly positive, and, because whole groups
are compared, it stays right when neighbouring steps are correlated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from noisescale.blocks import TOTAL, BatchUnit, Block, Geometry, MomentSums, main_geometry
from noisescale.errors import InvalidInputError
from noisescale.moments import noise_scale

WINDOW_STEPS = 1000
"""Measured steps an estimate looks back over, unless told otherwise."""

GROUPS = 20
"""Groups of blocks whose covariance gives the interval; fewer when there are fewer blocks."""

MIN_GROUPS = 8
"""Below this many blocks the steps' own covariance is used, as if they were independent."""

CONFIDENCE_LEVEL = 0.95

LARGEST = 1e100
"""A noise scale beyond this says no more than one that is unbounded."""


class Estimate(BaseModel):
    """The noise scale of a stretch of training, with its interval.

    Attributes:
        noise_scale: B_simple = tr(Sigma) / |G|^2 in `batch_unit`s (an order-of-magnitude proxy
            for the critical batch size); None where the average |G|^2 is not positive.
        lower: Lower end of the interval; 0 where nothing can be said.
        upper: Upper end; None = unbounded, |G|^2 is not significantly positive.
        upper_confirmed: Whether the two halves of the window, each by itself, give a bounded
            interval and the intervals overlap. An upper end that one lucky stretch gave is not
            to be acted on.
        trace_covariance: Average tr(Sigma), per example.
        true_grad_sq_norm: Average |G|^2; may be negative.
        measured_steps, skipped_steps: Steps behind the estimate, and steps left out for a
            non-finite gradient in the same stretch.
        first_step, last_step: The optimizer steps covered; None when there are none.
        global_batch_size: At the last block; None when there are none.
        every: Every how many steps one is measured; None where that is not known.
        interval_method: "blocks", or "steps" while there are too few blocks (steps then count
            as independent, and the interval may be too narrow), or "none".
    """

    model_config = ConfigDict(frozen=True)

    noise_scale: FiniteFloat | None = None
    lower: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    upper: FiniteFloat | None = None
    upper_confirmed: bool = False
    trace_covariance: FiniteFloat | None = None
    true_grad_sq_norm: FiniteFloat | None = None
    measured_steps: int = 0
    skipped_steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    global_batch_size: float | None = None
    batch_unit: BatchUnit = "examples"
    every: int | None = None
    geometry: Geometry = "euclidean"
    group: str = TOTAL
    confidence_level: float = CONFIDENCE_LEVEL
    interval_method: Literal["blocks", "steps", "none"] = "none"


@dataclass(frozen=True, slots=True)
class PairMean:
    """Means of (tr(Sigma), |G|^2) and the covariance matrix of those means."""

    trace_covariance: float
    true_grad_sq_norm: float
    trace_covariance_var: float
    true_grad_sq_norm_var: float
    covariance: float
    degrees_of_freedom: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Ends of a noise-scale interval; upper None = unbounded above."""

    lower: float
    upper: float | None


@dataclass(slots=True)
class _Group:
    steps: int = 0
    trace_covariance: float = 0.0
    true_grad_sq_norm: float = 0.0
    trace_covariance_sq: float = 0.0
    true_grad_sq_norm_sq: float = 0.0
    product: float = 0.0


def estimate(
    blocks: Sequence[Block],
    *,
    group: str = TOTAL,
    geometry: Geometry = "euclidean",
    window_steps: int = WINDOW_STEPS,
    every: int | None = None,
) -> Estimate:
    """The noise scale of the last `window_steps` measured steps of `blocks`.

    Args:
        blocks: Of one run and one regime (see noisescale.history), in step order.
        group: Layer group; "total" is the whole model.
        geometry: Which noise scale.
        window_steps: Measured steps to look back over.
        every: Passed through to the result.

    Raises:
        InvalidInputError: window_steps is not positive.
    """
    chosen = window(blocks, window_steps=window_steps)
    groups = []
    for block in chosen:
        sums = block.sums_of(group, geometry)
        if sums is not None and block.measured_steps > 0:
            groups.append(_group(block, sums))
    return _estimate_of(chosen, groups, group=group, geometry=geometry, every=every)


def estimate_all(
    blocks: Sequence[Block], *, window_steps: int = WINDOW_STEPS, every: int | None = None
) -> tuple[Estimate, ...]:
    """The same for every layer group and geometry that a run has, in one pass over its blocks.

    Returns:
        The whole model's first, Euclidean or in the geometry that stands for it (`main_geometry`), also
        where there is nothing in it; none at all without blocks.

    Raises:
        InvalidInputError: window_steps is not positive.
    """
    if not blocks:
        return ()
    chosen = window(blocks, window_steps=window_steps)
    groups: dict[tuple[str, Geometry], list[_Group]] = {(TOTAL, main_geometry(blocks)): []}
    for block in blocks:
        for sums in block.sums:
            groups.setdefault(sums.key, [])
    for block in chosen:
        if block.measured_steps > 0:
            for sums in block.sums:
                groups[sums.key].append(_group(block, sums))
    return tuple(
        _estimate_of(chosen, of_one, group=group, geometry=geometry, every=every)
        for (group, geometry), of_one in groups.items()
    )


def _estimate_of(
    chosen: Sequence[Block], groups: Sequence[_Group], *, group: str, geometry: Geometry, every: int | None
) -> Estimate:
    last = chosen[-1] if chosen else None
    mean, method = _mean(groups)
    found: dict[str, object] = {}
    if mean is not None:
        interval = fieller_interval(mean) if method != "none" else Interval(lower=0.0, upper=None)
        found = {
            "noise_scale": _finite(
                noise_scale(trace_covariance=mean.trace_covariance, true_grad_sq_norm=mean.true_grad_sq_norm)
            ),
            "lower": interval.lower,
            "upper": interval.upper,
            "upper_confirmed": interval.upper is not None and _halves_agree(groups),
            "trace_covariance": mean.trace_covariance,
            "true_grad_sq_norm": mean.true_grad_sq_norm,
            "interval_method": method,
        }
    return Estimate.model_validate(
        {
            **found,
            "measured_steps": sum(g.steps for g in groups),
            "skipped_steps": sum(block.skipped_steps for block in chosen),
            "first_step": chosen[0].first_step if chosen else None,
            "last_step": last.last_step if last else None,
            "global_batch_size": last.global_batch_size if last else None,
            "batch_unit": last.batch_unit if last else "examples",
            "every": every,
            "geometry": geometry,
            "group": group,
        }
    )


def window(blocks: Sequence[Block], *, window_steps: int) -> Sequence[Block]:
    """The fewest last blocks that hold `window_steps` measured steps; all, if they hold fewer.

    Raises:
        InvalidInputError: window_steps is not positive.
    """
    if window_steps < 1:
        raise InvalidInputError(f"window_steps must be at least 1, got {window_steps}", field="window_steps")
    seen = 0
    for index in range(len(blocks) - 1, -1, -1):
        seen += blocks[index].measured_steps
        if seen >= window_steps:
            return blocks[index:]
    return blocks


def fieller_interval(mean: PairMean, *, confidence_level: float = CONFIDENCE_LEVEL) -> Interval:
    """Fieller's interval for the ratio of two correlated means (Fieller 1954).

    The values r for which mean(S) - r mean(G) is not significantly different from 0. When
    |G|^2 is not significantly positive that set has no upper end; when tr(Sigma) is not
    significantly positive either, it has no positive lower end and lower is 0.
    """
    t = student_t_quantile((1 + confidence_level) / 2, mean.degrees_of_freedom)
    s, g = mean.trace_covariance, mean.true_grad_sq_norm
    a = g * g - t * t * mean.true_grad_sq_norm_var
    b = s * g - t * t * mean.covariance
    c = s * s - t * t * mean.trace_covariance_var
    discriminant = b * b - a * c
    if s <= 0 or c <= 0 or discriminant < 0:
        # tr(Sigma) is not told from 0: only an upper end can be had, and only if |G|^2 is.
        if a > 0 and g > 0 and discriminant >= 0:
            return Interval(lower=0.0, upper=_finite(max(0.0, (b + math.sqrt(discriminant)) / a)))
        return Interval(lower=0.0, upper=None)
    root = math.sqrt(discriminant)
    if a > 0:
        if g <= 0 or b + root <= 0:
            # |G|^2 is significantly negative, or the covariance is larger than the variances allow, which
            # no steps' is: nothing to stand on.
            return Interval(lower=0.0, upper=None)
        return Interval(lower=_finite(c / (b + root)) or 0.0, upper=_finite((b + root) / a))
    # a <= 0: the set is everything outside two roots of opposite sign; the positive one is c/(b+root).
    denominator = b + root
    return Interval(lower=(_finite(c / denominator) or 0.0) if denominator > 0 else 0.0, upper=None)


def student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Quantile of Student's t, by the Cornish-Fisher series (Abramowitz & Stegun 26.7.5).

    Within 0.2% from 5 degrees of freedom on, for probabilities up to .995.
    """
    if degrees_of_freedom < 1:
        raise InvalidInputError(
            f"degrees_of_freedom must be at least 1, got {degrees_of_freedom}", field="degrees_of_freedom"
        )
    z = NormalDist().inv_cdf(probability)
    v = float(degrees_of_freedom)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / v + g2 / v**2 + g3 / v**3 + g4 / v**4


def _group(block: Block, sums: MomentSums) -> _Group:
    return _Group(
        steps=sums.steps if sums.steps is not None else block.measured_steps,
        trace_covariance=sums.trace_covariance,
        true_grad_sq_norm=sums.true_grad_sq_norm,
        trace_covariance_sq=sums.trace_covariance_sq,
        true_grad_sq_norm_sq=sums.true_grad_sq_norm_sq,
        product=sums.product,
    )


def _regroup(groups: Sequence[_Group], *, count: int) -> list[_Group]:
    """Neighbouring blocks joined into `count` groups of about equally many steps."""
    total = sum(g.steps for g in groups)
    joined: list[_Group] = []
    seen = 0
    slot = -1
    for g in groups:
        now = min(count - 1, int((seen + g.steps / 2) * count / total))
        if now != slot:
            joined.append(_Group())
            slot = now
        into = joined[-1]
        into.steps += g.steps
        into.trace_covariance += g.trace_covariance
        into.true_grad_sq_norm += g.true_grad_sq_norm
        into.trace_covariance_sq += g.trace_covariance_sq
        into.true_grad_sq_norm_sq += g.true_grad_sq_norm_sq
        into.product += g.product
        seen += g.steps
    return joined


def _mean(
    groups: Sequence[_Group], *, count: int = GROUPS
) -> tuple[PairMean | None, Literal["blocks", "steps", "none"]]:
    n = sum(g.steps for g in groups)
    if n == 0:
        return None, "none"
    s = math.fsum(g.trace_covariance for g in groups) / n
    g2 = math.fsum(g.true_grad_sq_norm for g in groups) / n
    joined = _regroup(groups, count=count)
    if len(joined) >= MIN_GROUPS:
        k = len(joined)
        scale = k / (k - 1) / (n * n)
        deviations = [(g.trace_covariance - g.steps * s, g.true_grad_sq_norm - g.steps * g2) for g in joined]
        return (
            PairMean(
                trace_covariance=s,
                true_grad_sq_norm=g2,
                trace_covariance_var=scale * math.fsum(x * x for x, _ in deviations),
                true_grad_sq_norm_var=scale * math.fsum(y * y for _, y in deviations),
                covariance=scale * math.fsum(x * y for x, y in deviations),
                degrees_of_freedom=k - 1,
            ),
            "blocks",
        )
    if n < 3:
        return PairMean(s, g2, 0.0, 0.0, 0.0, 1), "none"
    scale = 1 / (n - 1) / n
    return (
        PairMean(
            trace_covariance=s,
            true_grad_sq_norm=g2,
            trace_covariance_var=max(
                0.0, scale * (math.fsum(g.trace_covariance_sq for g in groups) - n * s * s)
            ),
            true_grad_sq_norm_var=max(
                0.0, scale * (math.fsum(g.true_grad_sq_norm_sq for g in groups) - n * g2 * g2)
            ),
            covariance=scale * (math.fsum(g.product for g in groups) - n * s * g2),
            degrees_of_freedom=n - 1,
        ),
        "steps",
    )


def _halves_agree(groups: Sequence[_Group]) -> bool:
    """Whether each half of the window bounds the noise scale above, and the two overlap."""
    total = sum(g.steps for g in groups)
    seen = 0
    halves: tuple[list[_Group], list[_Group]] = ([], [])
    for g in groups:
        halves[0 if seen + g.steps / 2 < total / 2 else 1].append(g)
        seen += g.steps
    intervals: list[Interval] = []
    for half in halves:
        mean, method = _mean(half)
        if mean is None or method == "none":
            return False
        intervals.append(fieller_interval(mean))
    (first, second) = intervals
    if first.upper is None or second.upper is None:
        return False
    return first.lower <= second.upper and second.lower <= first.upper


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) <= LARGEST else None
