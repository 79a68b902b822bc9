"""A run's noise scale against its batch in a corner of the list."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noisescale.blocks import Block, Geometry
from noisescale.history import regime_starts
from noisescale_server.web.trailing import trailing_ratios

WIDTH, HEIGHT, MARGIN = 132.0, 36.0, 3.0
_POINTS = 40
_LOOK_BACK = 4
"""Each point is over a quarter of what is drawn: a whole window would leave one point."""


@dataclass(frozen=True, slots=True)
class Sparkline:
    """In a box of WIDTH by HEIGHT, on a logarithmic scale.

    Attributes:
        line: The noise scale, as points of an SVG polyline.
        batch: The batch, likewise.
        end: Where the line ends.
        steps: Measured steps drawn.
    """

    line: str
    batch: str
    end: tuple[float, float]
    steps: int


def sparkline(tail: Sequence[Block], *, geometry: Geometry = "euclidean") -> Sparkline | None:
    """What the last blocks of a run show; None where that is not two points yet."""
    steps = sum(block.measured_steps for block in tail)
    starts = regime_starts(tail)
    ratios = trailing_ratios(tail, starts=starts, window_steps=max(1, steps // _LOOK_BACK), geometry=geometry)
    # The first ones stand on next to nothing; they would press all the rest flat.
    begin = min(len(tail) // 10, 10)
    chosen = sorted({begin + round(i * (len(tail) - 1 - begin) / (_POINTS - 1)) for i in range(_POINTS)})
    points = [
        (index, ratio)
        for index in chosen
        if 0 <= index < len(tail) and (ratio := ratios[index].ratio) is not None and ratio > 0
    ]
    if len(points) < 2:
        return None
    batches = [tail[index].global_batch_size for index, _ in points]
    logs = [math.log(ratio) for _, ratio in points]
    low, high = min(*logs, *map(math.log, batches)), max(*logs, *map(math.log, batches))
    middle, half = (low + high) / 2, max((high - low) / 2, math.log(2))
    first, last = points[0][0], points[-1][0]

    def place(index: int, log: float) -> tuple[float, float]:
        x = MARGIN + (index - first) / (last - first) * (WIDTH - 2 * MARGIN)
        y = HEIGHT / 2 - (log - middle) / half * (HEIGHT / 2 - MARGIN)
        return round(x, 1), round(y, 1)

    line = [place(index, log) for (index, _), log in zip(points, logs, strict=True)]
    batch = [place(index, math.log(b)) for (index, _), b in zip(points, batches, strict=True)]
    return Sparkline(line=_svg(line), batch=_svg(batch), end=line[-1], steps=steps)


def _svg(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)
