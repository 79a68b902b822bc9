"""Steps into blocks, and blocks into one."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from noisescale.blocks import Block, BlockBuilder, MeasuredStep, MomentSums, merge_blocks
from noisescale.moments import StepMoments
from tests.synthetic import blocks_of

VALUES = st.floats(-1e6, 1e6, allow_subnormal=False)
USUAL = StepMoments(4.0, 0.01)
MOMENTS = st.builds(StepMoments, VALUES, VALUES)


def step(
    index: int,
    *,
    size: float = 64,
    rate: float | None = 0.1,
    moments: StepMoments | None = USUAL,
) -> MeasuredStep:
    return MeasuredStep(
        step=index,
        examples=int(size),
        global_batch_size=size,
        learning_rate=rate,
        moments=None if moments is None else {("total", "euclidean"): moments},
    )


@given(moments=st.lists(st.one_of(MOMENTS, st.none()), min_size=1, max_size=60), seed=st.integers(0, 99))
def test_blocks_merge_in_any_order(moments: list[StepMoments | None], seed: int) -> None:
    """Shuffled or nested merges give the sums of all steps."""
    blocks = blocks_of(moments, block_steps=7)
    shuffled = blocks[:]
    random.Random(seed).shuffle(shuffled)
    cut = len(shuffled) // 2
    nested = [merge_blocks(part) for part in (shuffled[:cut], shuffled[cut:]) if part]
    once, twice = merge_blocks(shuffled), merge_blocks(nested)
    assert once.measured_steps == twice.measured_steps == sum(m is not None for m in moments)
    assert once.skipped_steps == sum(m is None for m in moments)
    assert once.examples == twice.examples == 64 * len(moments)
    assert (once.first_step, once.last_step) == (0, len(moments) - 1)
    taken = [m for m in moments if m is not None]
    if taken:
        sums, again = once.sums_of(), twice.sums_of()
        assert sums is not None
        assert again is not None
        magnitude = math.fsum(abs(m.trace_covariance) for m in taken)
        assert sums.trace_covariance == pytest.approx(
            math.fsum(m.trace_covariance for m in taken), abs=1e-9 * magnitude + 1e-12
        )
        assert again.product == pytest.approx(sums.product, rel=1e-9, abs=1e-6)


def test_a_block_closes_by_steps_and_by_age() -> None:
    """Ten measured steps, or five seconds, whichever is first."""
    now = 0.0
    builder = BlockBuilder(block_steps=10, max_age_s=5.0, clock=lambda: now)
    closed = [block for i in range(10) for block in builder.add(step(i))]
    assert [b.measured_steps for b in closed] == [10]
    assert builder.add(step(10)) == []
    now = 6.0
    (late,) = builder.add(step(11))
    assert (late.first_step, late.last_step) == (10, 11)


def test_a_jump_of_the_learning_rate_closes_the_block_and_a_drift_does_not() -> None:
    """More than 20% between neighbours is a jump."""
    builder = BlockBuilder(clock=lambda: 0.0)
    assert builder.add(step(0, rate=0.1)) == []
    assert builder.add(step(1, rate=0.115)) == []
    (before,) = builder.add(step(2, rate=0.2))
    assert before.last_step == 1
    assert before.learning_rate == 0.115


def test_a_batch_change_closes_the_block_but_one_odd_step_does_not() -> None:
    """The last partial batch of an epoch is not a change; a second step of that size makes it one."""
    builder = BlockBuilder(clock=lambda: 0.0, block_steps=100)
    for i, size in enumerate([64, 64, 64, 20, 64, 64]):
        assert builder.add(step(i, size=size)) == []
    assert builder.add(step(6, size=128)) == []
    (before,) = builder.add(step(7, size=128))
    assert before.global_batch_size == 64
    assert before.last_step == 5
    assert before.examples == 64 * 5 + 20
    (after,) = builder.close(final=True)
    assert (after.first_step, after.last_step, after.global_batch_size) == (6, 7, 128)


def test_no_step_is_lost_at_the_end() -> None:
    """An odd step held back is taken in by a final close."""
    builder = BlockBuilder(clock=lambda: 0.0)
    builder.add(step(0))
    builder.add(step(1, size=10))
    (block,) = builder.close(final=True)
    assert block.last_step == 1
    assert block.examples == 74


def test_unmeasured_steps_between_are_covered() -> None:
    """Steps that were not measured belong to the block whose next measured step is theirs."""
    builder = BlockBuilder(clock=lambda: 0.0, block_steps=2)
    builder.add(step(9))
    (block,) = builder.add(step(19))
    assert (block.first_step, block.last_step, block.measured_steps) == (0, 19, 2)
    builder.add(step(29))
    (block,) = builder.add(step(39))
    assert block.first_step == 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"last_step": 3}, "run backwards"),
        ({"measured_steps": 11}, "exceed the 10 steps"),
        ({"sums": ()}, "sums is empty"),
        ({"examples": -1}, "greater than or equal to 0"),
        ({"global_batch_size": 0}, "greater than or equal to 0.000001"),
        ({"global_batch_size": math.inf}, "finite"),
        ({"learning_rate": math.nan}, "finite"),
        ({"first_step": 10**400, "last_step": 10**400}, "less than or equal"),
        ({"batch_unit": "bananas"}, "'examples' or 'tokens'"),
    ],
)
def test_a_block_that_cannot_be_is_refused(change: dict[str, object], says: str) -> None:
    """Each with a message that says what is wrong."""
    sums = {
        "trace_covariance": 40.0,
        "true_grad_sq_norm": 0.1,
        "trace_covariance_sq": 160.0,
        "true_grad_sq_norm_sq": 0.001,
        "product": 0.4,
    }
    good: dict[str, object] = {
        "first_step": 10,
        "last_step": 19,
        "measured_steps": 10,
        "examples": 640,
        "learning_rate": 0.1,
        "global_batch_size": 64,
        "sums": (sums,),
    }
    Block.model_validate(good)
    with pytest.raises(ValidationError, match=says):
        Block.model_validate(good | change)


def test_a_group_is_named_once() -> None:
    """Two entries for one group and geometry would count it twice."""
    sums = MomentSums(
        trace_covariance=1, true_grad_sq_norm=1, trace_covariance_sq=1, true_grad_sq_norm_sq=1, product=1
    )
    with pytest.raises(ValidationError, match="twice"):
        Block(first_step=0, last_step=0, measured_steps=1, examples=1, global_batch_size=1, sums=(sums, sums))


def test_merging_nothing_or_two_units_is_refused() -> None:
    """There is no block that says it."""
    with pytest.raises(ValueError, match="no blocks"):
        merge_blocks([])
    (one,) = blocks_of([StepMoments(1, 1)])
    with pytest.raises(ValueError, match="tokens"):
        merge_blocks([one, one.model_copy(update={"batch_unit": "tokens"})])
