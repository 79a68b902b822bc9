"""The strip that shows batch, advice and noise scale on one axis: positions along it, in percent."""

import math
from dataclasses import dataclass

from noisescale.advice import Recommendation
from noisescale.explain import exact

_MARGIN = 16.0
_MOST_TICKS = 7


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on the axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Strip:
    """A logarithmic axis of batch sizes; every place is a percentage of its length.

    Attributes:
        batch, noise_scale, advised: None where there is none.
        lower, upper: Of the interval; upper is the axis' end where it is unbounded.
        unbounded: Whether it is.
    """

    ticks: list[Tick]
    batch: Tick
    noise_scale: Tick | None
    advised: Tick | None
    lower: float | None
    upper: float | None
    unbounded: bool

    @property
    def width(self) -> float | None:
        """Of the interval."""
        return None if self.lower is None or self.upper is None else round(self.upper - self.lower, 2)


def strip_of(advice: Recommendation) -> Strip:
    """Where a run's batch stands."""
    scale = advice.noise_scale
    target = advice.global_batch_size if advice.action in ("raise", "lower") else None
    given = (advice.global_batch_size_now, target, scale.value, scale.lower, scale.upper)
    sizes = [size for size in given if size]
    low, high = math.log(min(sizes)), math.log(max(sizes))
    if scale.upper is None:
        high += math.log(4)
    spread = max(high - low, math.log(4))
    low, high = (low + high - spread) / 2, (low + high + spread) / 2

    def place(size: float) -> float:
        return round(_MARGIN + (math.log(size) - low) / (high - low) * (100 - 2 * _MARGIN), 2)

    def tick(size: float | None) -> Tick | None:
        return Tick(place(size), exact(size)) if size else None

    return Strip(
        ticks=[Tick(place(size), exact(size)) for size in _round_sizes(low, high)],
        batch=Tick(place(advice.global_batch_size_now), exact(advice.global_batch_size_now)),
        noise_scale=tick(scale.value),
        advised=tick(target),
        lower=place(scale.lower) if scale.lower else None,
        upper=(place(scale.upper) if scale.upper else 100.0) if scale.lower else None,
        unbounded=scale.upper is None,
    )


def _round_sizes(low: float, high: float) -> list[float]:
    """Powers of two, or of a higher one where there would be too many."""
    first, last = math.ceil(low / math.log(2) - 1e-9), math.floor(high / math.log(2) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    return [2.0**power for power in range(first, last + 1, stride) if power >= 0]
