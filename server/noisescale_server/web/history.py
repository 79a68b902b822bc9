"""A run's whole history, read for drawing: what to draw of it, where it changed, what its LR did."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import BaseModel

from noisescale.blocks import TOTAL, Block, Geometry, learning_rate_jumped
from noisescale.estimate import Estimate, estimate
from noisescale.explain import exact, number
from noisescale.history import PHASE_BLOCKS, Phase, batch_changed, phase_of, regime_starts
from noisescale_server.web.downsample import keep_extremes
from noisescale_server.web.trailing import Trailing, trailing_ratios

MOST_CHANGES = 60
"""A rate that is set in leaps all along would otherwise cover a chart with markers."""


class Change(BaseModel):
    """Something that happens at a step, and from there on.

    Attributes:
        step, examples: Taken before it.
    """

    kind: Literal["batch", "learning_rate", "restart"]
    step: int
    examples: int
    text: str


class Stretch(BaseModel):
    """Steps in which the learning rate does one thing."""

    phase: Phase
    first_step: int
    last_step: int
    first_examples: int
    last_examples: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """One group's and geometry's estimates at some blocks."""

    indices: list[int]
    estimates: list[Estimate]


class History:
    """All blocks of a run.

    Args:
        blocks: In step order.
        window_steps: Measured steps that each estimate looks back over, within its regime.
    """

    def __init__(self, blocks: Sequence[Block], *, window_steps: int) -> None:
        self.blocks = blocks
        self.window_steps = window_steps

    @cached_property
    def starts(self) -> list[int]:
        """For each block, where its regime starts."""
        return regime_starts(self.blocks)

    @cached_property
    def examples(self) -> list[int]:
        """Examples consumed up to each block's end."""
        return list(itertools.accumulate(block.examples for block in self.blocks))

    def trailing(self, *, group: str = TOTAL, geometry: Geometry = "euclidean") -> list[Trailing]:
        """The point values at every block."""
        return trailing_ratios(
            self.blocks, starts=self.starts, window_steps=self.window_steps, group=group, geometry=geometry
        )

    def drawn(
        self,
        *,
        max_points: int,
        group: str = TOTAL,
        geometry: Geometry = "euclidean",
        every_column: bool = False,
    ) -> Drawn:
        """Estimates with their intervals, at the blocks that matter for a chart.

        Args:
            every_column: Keep the extremes of all that is drawn over steps; else of the noise
                scale alone.
        """
        trailing = self.trailing(group=group, geometry=geometry)
        columns: list[list[float | None]] = [[point.ratio for point in trailing]]
        always: set[int] = set()
        if every_column:
            columns.append([point.trace_covariance for point in trailing])
            columns.append([point.true_grad_sq_norm for point in trailing])
            columns.append([block.learning_rate for block in self.blocks])
            columns.append([block.global_batch_size for block in self.blocks])
            ends = [i for i in range(1, len(self.blocks)) if self.starts[i] == i][-MOST_CHANGES:]
            always = {index for end in ends for index in (end - 1, end)}
        indices = keep_extremes(columns, max_points=max_points, always=always)
        return Drawn(indices, [self.estimate_at(i, trailing[i], group, geometry) for i in indices])

    def estimate_at(self, index: int, at: Trailing, group: str, geometry: Geometry) -> Estimate:
        """The estimate over the window that ends at a block."""
        return estimate(
            self.blocks[at.start : index + 1],
            group=group,
            geometry=geometry,
            window_steps=self.window_steps,
        )

    def changes(self, restarts: Sequence[tuple[int, int]] = ()) -> list[Change]:
        """Where the batch or the learning rate jumped, or a later attempt took over; in step order.

        Args:
            restarts: Of each attempt after the first: which one it is, and its first step.
        """
        found: list[Change] = []
        for index, (before, after) in enumerate(itertools.pairwise(self.blocks)):
            at = {"step": after.first_step, "examples": self.examples[index]}
            if batch_changed(before, after):
                text = f"batch {exact(before.global_batch_size)} → {exact(after.global_batch_size)}"
                found.append(Change.model_validate({"kind": "batch", "text": text, **at}))
            if self._rate_leaps(index):
                text = (
                    f"learning rate {number(before.learning_rate or 0)} → {number(after.learning_rate or 0)}"
                )
                found.append(Change.model_validate({"kind": "learning_rate", "text": text, **at}))
        for attempt, step in restarts:
            consumed = [e for b, e in zip(self.blocks, self.examples, strict=True) if b.last_step < step]
            found.append(
                Change(
                    kind="restart",
                    step=step,
                    examples=consumed[-1] if consumed else 0,
                    text=f"attempt {attempt} starts",
                )
            )
        return sorted(found, key=lambda change: change.step)

    def _rate_leaps(self, index: int) -> bool:
        """Whether the rate jumps after a block, and is not on a steep way, as where a warmup begins."""
        rates = [block.learning_rate for block in self.blocks[max(0, index - 1) : index + 3]]
        before, after = self.blocks[index].learning_rate, self.blocks[index + 1].learning_rate
        if before is None or after is None or not learning_rate_jumped(before, after):
            return False
        moves = [b - a for a, b in itertools.pairwise(rates) if a is not None and b is not None]
        return sum(move * (after - before) > 0 for move in moves) == 1

    def stretches(self) -> list[Stretch]:
        """What the learning rate does, from the first step to the last."""
        found: list[Stretch] = []
        for index, block in enumerate(self.blocks):
            phase = self._phase_at(index)
            consumed = self.examples[index]
            if found and found[-1].phase == phase:
                found[-1].last_step, found[-1].last_examples = block.last_step + 1, consumed
            else:
                found.append(
                    Stretch(
                        phase=phase,
                        first_step=block.first_step,
                        last_step=block.last_step + 1,
                        first_examples=consumed - block.examples,
                        last_examples=consumed,
                    )
                )
        return found

    @cached_property
    def _smooth_starts(self) -> list[int]:
        """For each block, where its stretch without a leap of the rate starts."""
        starts = [0] * len(self.blocks)
        for index in range(1, len(self.blocks)):
            starts[index] = index if self._rate_leaps(index - 1) else starts[index - 1]
        return starts

    def _phase_at(self, index: int) -> Phase:
        start = self._smooth_starts[index]
        if index == start and index + 1 < len(self.blocks) and self._smooth_starts[index + 1] == start:
            index += 1  # a stretch's first block alone says nothing; the next one tells
        recent = self.blocks[max(start, index + 1 - PHASE_BLOCKS) : index + 1]
        return phase_of([block.learning_rate for block in recent])
