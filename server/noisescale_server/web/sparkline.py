"""A run's noise scale against its batch in a corner of the list."""

import itertools
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
        lines: The noise scale, as points of SVG polylines; where it is not known there is a gap.
        batch: The batch, as points of one polyline.
        end: Where the line ends.
        steps: Measured steps drawn.
    """

    lines: list[str]
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
    chosen = [index for index in chosen if 0 <= index < len(tail)]
    logs = {i: math.log(ratio) for i in chosen if (ratio := ratios[i].ratio) is not None and ratio > 0}
    if len(logs) < 2:
        return None
    batches = {index: math.log(tail[index].global_batch_size) for index in chosen}
    low, high = min(*logs.values(), *batches.values()), max(*logs.values(), *batches.values())
    middle, half = (low + high) / 2, max((high - low) / 2, math.log(2))
    first, last = chosen[0], chosen[-1]

    def place(index: int, log: float) -> tuple[float, float]:
        x = MARGIN + (index - first) / (last - first) * (WIDTH - 2 * MARGIN)
        y = HEIGHT / 2 - (log - middle) / half * (HEIGHT / 2 - MARGIN)
        return round(x, 1), round(y, 1)

    pieces = [
        [place(index, logs[index]) for index in piece]
        for known, piece in itertools.groupby(chosen, key=logs.__contains__)
        if known
    ]
    return Sparkline(
        lines=[_svg(piece) for piece in pieces],
        batch=_svg([place(index, log) for index, log in batches.items()]),
        end=pieces[-1][-1],
        steps=steps,
    )


def _svg(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)
