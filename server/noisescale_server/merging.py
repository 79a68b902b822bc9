"""Which old blocks become one, and how: the older, the coarser. Sums stay what they are.

Age is counted in measured steps that came after, in units of two windows: younger blocks are left alone,
since live estimates look at them. From there on each doubling of the age doubles the steps of a block, so
that a run of n steps has some 400 log2(n) blocks. A block never reaches over a change of the batch, a leap of
the learning rate, a gap, or the start of an attempt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noisescale.blocks import Block, learning_rate_jumped, merge_blocks
from noisescale.history import batch_changed, regime_starts

_YOUNG_WINDOWS = 2
_YOUNG_BLOCKS = 2048
"""Left alone: so many windows, or so many blocks should they be of very few steps each."""

_BLOCKS_PER_DOUBLING = 400
"""Blocks between one age and twice that age."""

ROW_BLOCKS = 64
"""Blocks in one row of merged ones."""

_UNIT_BLOCKS = 128
"""Blocks that are worth a transaction; fewer wait for their neighbours."""

_MOST_UNIT_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """A segment without its body.

    Attributes:
        level: Up to which it has been merged; 0: not at all.
    """

    first_step: int
    attempt: int
    last_step: int
    blocks: int
    measured_steps: int
    level: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Neighbouring segments of one attempt, to be merged in one transaction.

    Attributes:
        before: The segment that comes before them, None where there is none.
    """

    rows: tuple[Row, ...]
    before: Row | None
    level: int


def units(rows: Sequence[Row], *, window_steps: int) -> list[Unit]:
    """What there is to merge in a run now; oldest first.

    Args:
        rows: All its segments that count, in step order.
    """
    levels = _levels(rows, window_steps=window_steps)
    found: list[Unit] = []
    index = 0
    while index < len(rows):
        if not _is_due(rows[index], levels[index], window_steps=window_steps):
            index += 1
            continue
        end, blocks = index + 1, rows[index].blocks
        while (
            end < len(rows)
            and blocks < _UNIT_BLOCKS
            and _is_due(rows[end], levels[end], window_steps=window_steps)
            and _follows(rows[end - 1], rows[end])
            and blocks + rows[end].blocks <= _MOST_UNIT_BLOCKS
        ):
            blocks += rows[end].blocks
            end += 1
        can_grow = end < len(rows) and _follows(rows[end - 1], rows[end])
        if blocks >= _UNIT_BLOCKS or not can_grow:
            before = rows[index - 1] if index else None
            found.append(Unit(tuple(rows[index:end]), before, min(levels[index:end])))
        index = end
    return found


def merged(
    blocks: Sequence[Block], *, before: Block | None, level: int, window_steps: int
) -> tuple[Block, ...]:
    """The same blocks, fewer.

    Args:
        blocks: Neighbours, in step order.
        before: The one before them.
        level: How coarse they may become.

    Returns:
        Blocks with the same sums, of which no two neighbours look like a change that was none. The blocks as
        they were, where that cannot be.
    """
    most = block_steps(level, window_steps=window_steps)
    starts = regime_starts(blocks)
    groups: list[list[Block]] = []
    reference = before
    for index, block in enumerate(blocks):
        if groups and starts[index] != index and _fits(groups[-1], block, reference, most=most):
            groups[-1].append(block)
        else:
            reference = groups[-1][-1] if groups else before
            groups.append([block])
    try:
        found = tuple(merge_blocks(group) if len(group) > 1 else group[0] for group in groups)
    except ValueError:  # sums beyond what a block may hold
        return tuple(blocks)
    return found if _changes(found) == _changes(blocks) else tuple(blocks)


def block_steps(level: int, *, window_steps: int) -> float:
    """Measured steps that a block of a level may have."""
    return _YOUNG_WINDOWS * window_steps / _BLOCKS_PER_DOUBLING * 2.0 ** (level - 1)


def _fits(group: Sequence[Block], block: Block, reference: Block | None, *, most: float) -> bool:
    """Whether a block may join those before it, whose own predecessor is `reference`."""
    if sum(_weight(one) for one in group) + _weight(block) > most:
        return False
    if reference is None:
        reference = group[0]
    return not learning_rate_jumped(reference.learning_rate, block.learning_rate) and not (
        batch_changed(group[0], block)
    )


def _weight(block: Block) -> int:
    return max(1, block.measured_steps)


def _changes(blocks: Sequence[Block]) -> list[int]:
    """The steps at which something changes."""
    return [blocks[index].first_step for index, start in enumerate(regime_starts(blocks)) if start == index]


def _levels(rows: Sequence[Row], *, window_steps: int) -> list[int]:
    """How coarse each segment may be."""
    levels = [0] * len(rows)
    steps = blocks = 0
    for index in range(len(rows) - 1, -1, -1):
        age = max(steps / (_YOUNG_WINDOWS * window_steps), blocks / _YOUNG_BLOCKS)
        levels[index] = 0 if age < 1 else 1 + math.floor(math.log2(age))
        steps += rows[index].measured_steps
        blocks += rows[index].blocks
    return levels


def _is_due(row: Row, level: int, *, window_steps: int) -> bool:
    """Whether merging would do something: its blocks are finer than they may be, or its row is short."""
    if row.level >= level:
        return False
    is_fine = row.measured_steps < row.blocks * block_steps(level, window_steps=window_steps)
    return is_fine or row.blocks < ROW_BLOCKS // 2


def _follows(before: Row, after: Row) -> bool:
    return before.attempt == after.attempt and before.last_step + 1 == after.first_step
