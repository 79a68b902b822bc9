"""Old blocks become fewer: the sums stay, and so does everything that looks like a change."""

import itertools
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from noisescale.blocks import Block, MomentSums, merge_blocks
from noisescale.history import regime_starts
from noisescale_server.merging import Row, block_steps, merged, units

WINDOW = 100

SUMS = ("trace_covariance", "true_grad_sq_norm", "trace_covariance_sq", "true_grad_sq_norm_sq", "product")


@st.composite
def runs_of_blocks(draw: st.DrawFn) -> list[Block]:
    """Neighbours without gaps, of changing batches, learning rates, groups and counts."""
    blocks: list[Block] = []
    step, batch, rate = draw(st.integers(0, 1000)), 64.0, 0.1
    for _ in range(draw(st.integers(1, 40))):
        steps = draw(st.integers(1, 12))
        measured = draw(st.integers(0, steps))
        batch = draw(st.sampled_from([batch] * 6 + [128.0]))
        rate = draw(st.sampled_from([rate] * 4 + [rate * 1.1, rate * 0.95, rate * 3]))
        values = draw(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2))
        sums = tuple(
            MomentSums(
                group=group,
                geometry="euclidean",
                trace_covariance=values[0],
                true_grad_sq_norm=values[1],
                trace_covariance_sq=values[0] ** 2 + 1,
                true_grad_sq_norm_sq=values[1] ** 2 + 1,
                product=values[0] * values[1],
            )
            for group in draw(st.sampled_from([("total",), ("total", "head")]))
        )
        blocks.append(
            Block(
                first_step=step,
                last_step=step + steps - 1,
                measured_steps=measured,
                examples=int(batch) * measured,
                learning_rate=draw(st.sampled_from([rate, rate, rate, None])),
                global_batch_size=batch,
                uneven_steps=draw(st.booleans()),
                sums=sums if measured else (),
            )
        )
        step += steps
    return blocks


@settings(max_examples=200, deadline=None)
@given(runs_of_blocks(), st.integers(1, 8))
def test_merging_keeps_sums_and_changes(blocks: list[Block], level: int) -> None:
    """Each new block is some neighbours, whole; all together say what the old ones said."""
    fewer = merged(blocks, before=None, level=level, window_steps=WINDOW)
    assert len(fewer) <= len(blocks)
    assert (fewer[0].first_step, fewer[-1].last_step) == (blocks[0].first_step, blocks[-1].last_step)
    assert all(b.first_step == a.last_step + 1 for a, b in itertools.pairwise(fewer))
    assert {block.first_step for block in fewer} <= {block.first_step for block in blocks}
    assert changes(fewer) == changes(blocks)
    for new in fewer:
        old = [block for block in blocks if new.first_step <= block.first_step <= new.last_step]
        assert len(old) == 1 or new.measured_steps <= block_steps(level, window_steps=WINDOW)
    before, after = merge_blocks(blocks), merge_blocks(fewer)
    for name in ("measured_steps", "skipped_steps", "examples"):
        assert getattr(after, name) == getattr(before, name)
    for one in before.sums:
        other = after.sums_of(one.group)
        assert other is not None
        for name in SUMS:
            old_value = getattr(one, name)
            scale = sum(abs(getattr(s, name)) for b in blocks for s in b.sums if s.group == one.group)
            assert math.isclose(getattr(other, name), old_value, rel_tol=1e-12, abs_tol=1e-12 * scale)


def changes(blocks: Any) -> list[int]:
    """The steps at which a regime starts."""
    return [block.first_step for block, start in zip(blocks, _starts(blocks), strict=True) if start]


def _starts(blocks: Any) -> list[bool]:
    return [index == start for index, start in enumerate(regime_starts(blocks))]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 10), st.integers(0, 6), st.integers(0, 9)),
        min_size=1,
        max_size=80,
    )
)
def test_units_are_old_neighbours(made: list[tuple[int, int, int, int]]) -> None:
    """What is merged together follows each other in one attempt, is not young, and is merged once."""
    rows: list[Row] = []
    step, attempt = 0, 1
    for blocks, per_block, level, change in made:
        step += 5 if change == 0 else 0
        attempt += 1 if change == 1 else 0
        rows.append(Row(step, attempt, step + blocks * per_block - 1, blocks, blocks * per_block, level))
        step += blocks * per_block
    found = units(rows, window_steps=WINDOW)
    taken = [row for unit in found for row in unit.rows]
    assert len(taken) == len(set(taken))
    for unit in found:
        assert len({row.attempt for row in unit.rows}) == 1
        assert all(b.first_step == a.last_step + 1 for a, b in itertools.pairwise(unit.rows))
        after = [row for row in rows if row.first_step > unit.rows[-1].first_step]
        assert sum(r.measured_steps for r in after) >= 2 * WINDOW or sum(r.blocks for r in after) >= 2048
        assert all(row.level < unit.level for row in unit.rows)
        index = rows.index(unit.rows[0])
        assert unit.before == (rows[index - 1] if index else None)
