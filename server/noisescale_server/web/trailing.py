"""The noise scale at every block of a run in one pass: point values only, to choose what to draw."""

from collections.abc import Sequence
from typing import NamedTuple

from noisescale.blocks import TOTAL, Block


class Trailing(NamedTuple):
    """Means over the window that ends at a block; None before anything was measured."""

    trace_covariance: float | None
    true_grad_sq_norm: float | None
    ratio: float | None
    start: int


def trailing_ratios(
    blocks: Sequence[Block],
    *,
    starts: Sequence[int],
    window_steps: int,
    group: str = TOTAL,
    geometry: str = "euclidean",
) -> list[Trailing]:
    """What noisescale.estimate gives at each block, without the interval.

    Args:
        blocks: In step order.
        starts: For each block, where its regime starts.
        window_steps: Measured steps to look back over, within the regime.
    """
    found: list[Trailing] = []
    trace = signal = 0.0
    measured = steps = 0
    start = 0
    sums = [block.sums_of(group, geometry) for block in blocks]
    counts = [
        0 if s is None else (s.steps if s.steps is not None else block.measured_steps)
        for s, block in zip(sums, blocks, strict=True)
    ]
    for index, block in enumerate(blocks):
        if starts[index] > start:  # a new regime: begin again, with exact zeros
            trace = signal = 0.0
            measured = steps = 0
            start = starts[index]
        if (entered := sums[index]) is not None:
            trace += entered.trace_covariance
            signal += entered.true_grad_sq_norm
        measured += block.measured_steps
        steps += counts[index]
        while start < index and measured - blocks[start].measured_steps >= window_steps:
            if (left := sums[start]) is not None:
                trace -= left.trace_covariance
                signal -= left.true_grad_sq_norm
            measured -= blocks[start].measured_steps
            steps -= counts[start]
            start += 1
        if steps == 0:
            found.append(Trailing(None, None, None, start))
        else:
            ratio = trace / signal if signal > 0 and trace > 0 else None
            found.append(Trailing(trace / steps, signal / steps, ratio, start))
    return found
