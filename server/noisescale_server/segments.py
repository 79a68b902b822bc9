"""Segments: blocks of one attempt that follow each other without a gap, and are stored as one row."""

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from noisescale.blocks import Block

_BLOCKS = TypeAdapter(tuple[Block, ...])


def segment_rows(
    run_id: int, attempt: int, blocks: Sequence[Block], *, superseded: bool, level: int = 0
) -> list[dict[str, Any]]:
    """Rows of the table of segments for these blocks, which are in step order.

    Args:
        level: How far they have been merged.
    """
    return [
        {
            "run_id": run_id,
            "first_step": part[0].first_step,
            "attempt": attempt,
            "last_step": part[-1].last_step,
            "blocks": len(part),
            "measured_steps": sum([block.measured_steps for block in part]),
            "skipped_steps": sum([block.skipped_steps for block in part]),
            "examples": sum([block.examples for block in part]),
            "superseded": superseded,
            "body": encode(part),
            "level": level,
        }
        for part in _without_gaps(blocks)
    ]


def encode(blocks: Sequence[Block]) -> str:
    """Blocks as a segment's body."""
    # What is left out has the value that it has where a job leaves it out: the wire's defaults are fixed.
    return _BLOCKS.dump_json(tuple(blocks), exclude_none=True, exclude_defaults=True).decode()


def decode(body: str) -> tuple[Block, ...]:
    """The blocks of a segment's body.

    Raises:
        ValidationError: It is not what `encode` wrote.
    """
    return _BLOCKS.validate_json(body)


def _without_gaps(blocks: Sequence[Block]) -> list[Sequence[Block]]:
    parts: list[Sequence[Block]] = []
    start = 0
    for index in range(1, len(blocks)):
        if blocks[index].first_step != blocks[index - 1].last_step + 1:
            parts.append(blocks[start:index])
            start = index
    if blocks:
        parts.append(blocks[start:])
    return parts
