"""Batches realised as micro-batch x ranks x accumulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescale.errors import ContradictionError
from noisescale.layout import complete_layout, realise


@given(
    target=st.integers(1, 2000),
    ranks=st.integers(1, 64),
    largest=st.integers(1, 64),
)
def test_realised_batch_is_the_largest_that_fits(target: int, ranks: int, largest: int) -> None:
    """Compared with trying every micro-batch and every accumulation."""
    found = realise(target=target, dp_world_size=ranks, max_micro_batch_size=largest)
    per_rank = target // ranks
    every = [(b * a, -a) for b in range(1, largest + 1) for a in range(1, per_rank // b + 1)]
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.micro_batch_size <= largest
    product, accumulation = max(every)
    assert found.micro_batch_size * found.accumulation_steps == product
    assert found.accumulation_steps == -accumulation


def test_a_fixed_micro_batch_is_kept() -> None:
    """Nets with BatchNorm accumulate instead, and cannot go below one micro-batch per rank."""
    found = realise(target=512, dp_world_size=8, max_micro_batch_size=64, fixed_micro_batch_size=32)
    assert found is not None
    assert (found.micro_batch_size, found.accumulation_steps) == (32, 2)
    assert realise(target=128, dp_world_size=8, max_micro_batch_size=64, fixed_micro_batch_size=32) is None


def test_one_number_follows_from_the_others() -> None:
    """Any one of the three may be left out."""
    for gone in ("micro_batch_size", "dp_world_size", "accumulation_steps"):
        known: dict[str, int | None] = {"micro_batch_size": 32, "dp_world_size": 4, "accumulation_steps": 2}
        known[gone] = None
        found = complete_layout(global_batch_size=256, **known)  # type: ignore[arg-type]  # all are ints here
        if gone == "micro_batch_size":
            assert found is not None
            assert found.micro_batch_size == 32
        else:
            assert found is not None
            assert (found.dp_world_size, found.accumulation_steps) == (4, 2)


def test_too_little_known_is_no_layout() -> None:
    """Without ranks there is nothing to lay out."""
    assert (
        complete_layout(
            global_batch_size=256, micro_batch_size=None, dp_world_size=None, accumulation_steps=None
        )
        is None
    )


@pytest.mark.parametrize(
    ("micro", "ranks", "accumulation"), [(1, 100, 1), (32, 3, None), (48, 4, 1), (30, 4, None)]
)
def test_a_product_that_is_not_the_batch_is_a_contradiction(
    micro: int, ranks: int, accumulation: int | None
) -> None:
    """Both fields are named, with the product."""
    with pytest.raises(ContradictionError, match=r"global_batch_size 64 and the layout disagree") as caught:
        complete_layout(
            global_batch_size=64, micro_batch_size=micro, dp_world_size=ranks, accumulation_steps=accumulation
        )
    assert caught.value.fields == ("global_batch_size", "micro_batch_size")


def test_sizes_that_vary_are_given_slack() -> None:
    """Tokens: a median batch need not be the exact product."""
    found = complete_layout(
        global_batch_size=4000, micro_batch_size=510, dp_world_size=4, accumulation_steps=2, tolerance=0.2
    )
    assert found is not None


@pytest.mark.parametrize(
    ("target", "largest"), [(2**53 - 111, 2), (2**53 - 111, 2**31), (1e100, 1), (1e100, 3 * 2**29 - 1)]
)
def test_numbers_that_are_no_batch_are_answered_at_once(target: float, largest: int) -> None:
    """A batch that would take years of trying is split nearly as well as can be, in few tries."""
    found = realise(target=target, dp_world_size=1, max_micro_batch_size=largest)
    assert found is not None
    assert 0 <= (target - found.global_batch_size) / target <= 1 / largest


def test_no_example_fits() -> None:
    """A micro-batch of less than one example, as a batch over more ranks than it has examples comes to."""
    assert realise(target=25, dp_world_size=5, max_micro_batch_size=0) is None
    assert realise(target=25, dp_world_size=5, max_micro_batch_size=4, fixed_micro_batch_size=0) is None
