"""Examples and tokens are counted from shapes, and micro-batches add up to the right sample."""

from typing import Any

import pytest
import torch

from noisescale.errors import BatchCountError
from noisescale.hooks.counting import BatchCounter, count_by, count_inputs

IDS = torch.zeros(3, 7, dtype=torch.long)
IMAGES = torch.zeros(5, 1, 2, 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "unit", "wanted"),
    [
        ((IMAGES,), {}, "examples", 5),
        ((torch.tensor(1.0), IMAGES), {}, "examples", 5),
        (({"pixels": IMAGES, "labels": IDS},), {}, "examples", 5),
        (([IMAGES, IMAGES],), {}, "examples", 5),
        ((), {"input_ids": IDS}, "examples", 3),
        ((), {"mask": torch.zeros(3, 7), "input_ids": IDS}, "tokens", 21),
        ((torch.zeros(3, 7, dtype=torch.bool), IDS), {}, "tokens", 21),
    ],
)
def test_counts(args: tuple[Any, ...], kwargs: dict[str, Any], unit: Any, wanted: int) -> None:
    """Dim 0 of the first tensor that has one; in tokens the first integer tensor's elements."""
    assert count_inputs(args, kwargs, batch_unit=unit) == wanted


@pytest.mark.parametrize("answer", [2.5, None, "3", -1, torch.tensor(3)])
def test_count_must_answer_a_whole_number(answer: Any) -> None:
    """A user's count= that answers anything else is told what it answered."""
    with pytest.raises(BatchCountError, match="count= returned"):
        count_by(lambda args, kwargs: answer, (), {}, batch_unit="examples")


def test_uneven_micro_batches_weigh_as_they_do_in_the_mean() -> None:
    """The mean of gradients over 2 and 6 examples varies as tr(Sigma) (1/2 + 1/6) / 4."""
    counter = BatchCounter()
    for size in (2, 6):
        counter.add(size, training=True)
    tally = counter.take()
    assert (tally.micro_batches, tally.count) == (2, 8)
    assert tally.inverse_count == pytest.approx((1 / 2 + 1 / 6) / 4)
    assert counter.take().micro_batches == 0


def test_evaluation_counts_only_where_nothing_trains() -> None:
    """A forward in eval mode with gradients is left out beside training ones, and counted alone."""
    counter = BatchCounter()
    counter.add(100, training=False)
    counter.add(8, training=True)
    assert counter.take().count == 8
    counter.add(100, training=False)
    assert counter.take().count == 100
