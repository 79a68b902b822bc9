"""What a run's blocks say of its schedule: regimes and phases.

A regime is a stretch in which the noise scale means one thing: one batch size, one smooth
stretch of learning rate. It ends at a jump of the LR by more than 20% between neighbouring
blocks, at any change of the global batch, and where a warmup ends. A phase is what a smooth LR
is doing: rising ("warmup"), falling ("lr_decay") or neither ("steady").
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noisescale.blocks import SMOOTH_LEARNING_RATE_RATIO, Block, learning_rate_jumped

Phase = Literal["steady", "warmup", "lr_decay"]

PHASE_BLOCKS = 5
"""How many last blocks tell what the learning rate is doing now."""


@dataclass(frozen=True, slots=True)
class Regime:
    """The stretch of training that is still going on.

    Attributes:
        blocks: Its blocks, in step order; only these count as clean steps.
        phase: What the learning rate is doing at its end.
        learning_rate: At its last block; None where the job reports none.
    """

    blocks: tuple[Block, ...]
    phase: Phase
    learning_rate: float | None

    @property
    def measured_steps(self) -> int:
        return sum(block.measured_steps for block in self.blocks)


def current_regime(blocks: Sequence[Block]) -> Regime:
    """The last regime of a run.

    Args:
        blocks: The run's blocks in step order, as far back as they are at hand.
    """
    start = regime_starts(blocks)[-1] if blocks else 0
    current = tuple(blocks[start:])
    return Regime(
        blocks=current,
        phase=phase_of([block.learning_rate for block in current]),
        learning_rate=current[-1].learning_rate if current else None,
    )


def regime_starts(blocks: Sequence[Block]) -> list[int]:
    """For every block, the index at which the regime that it belongs to starts."""
    starts = [0] * len(blocks)
    rising = False
    for index in range(1, len(blocks)):
        before, after = blocks[index - 1], blocks[index]
        was_rising, rising = rising, _rises(before, after)
        warmup_ended = was_rising and not rising and _rising_for(blocks, index - 1) >= 2
        jumped = learning_rate_jumped(before.learning_rate, after.learning_rate)
        new = batch_changed(before, after) or jumped or warmup_ended
        starts[index] = index if new else starts[index - 1]
    return starts


def batch_changed(before: Block, after: Block) -> bool:
    """Whether the global batch is another one.

    Any change counts, but where sizes vary from step to step by nature (tokens, bucketed
    data) only one of more than 20% does.
    """
    if before.batch_unit != after.batch_unit:
        return True
    low, high = sorted((before.global_batch_size, after.global_batch_size))
    if before.batch_unit == "tokens" or before.uneven_steps or after.uneven_steps:
        return high > low * SMOOTH_LEARNING_RATE_RATIO
    return high != low


def phase_of(learning_rates: Sequence[float | None]) -> Phase:
    """The phase at the end of one regime's learning rates, one per block."""
    recent = [lr for lr in learning_rates[-PHASE_BLOCKS:] if lr is not None]
    if len(recent) < 2:
        return "steady"
    changes = [b - a for a, b in itertools.pairwise(recent) if a != b]
    if not changes:
        return "steady"
    if changes[-1] > 0:
        return "warmup" if recent[-1] > recent[-2] else "steady"
    return "lr_decay"


def _rises(before: Block, after: Block) -> bool:
    if before.learning_rate is None or after.learning_rate is None:
        return False
    return after.learning_rate > before.learning_rate


def _rising_for(blocks: Sequence[Block], index: int) -> int:
    """For how many neighbours in a row the LR had been rising at block `index`."""
    count = 0
    while index - count > 0 and _rises(blocks[index - count - 1], blocks[index - count]):
        count += 1
    return count
