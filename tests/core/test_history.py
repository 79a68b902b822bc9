"""Regimes and phases from a run's blocks."""

import math
from collections.abc import Sequence

import pytest

from noisescale.blocks import Block
from noisescale.history import batch_changed, current_regime
from noisescale.moments import StepMoments
from tests.synthetic import blocks_of


def history(rates: Sequence[float], *, size: float = 64) -> list[Block]:
    return blocks_of(
        [StepMoments(4.0, 0.01)] * len(rates), learning_rates=list(rates), global_batch_size=size
    )


def test_a_constant_rate_is_one_steady_regime() -> None:
    """Nothing happened: every block counts."""
    regime = current_regime(history([0.1] * 300))
    assert regime.phase == "steady"
    assert regime.measured_steps == 300
    assert regime.learning_rate == 0.1


def test_linear_warmup_is_a_phase_and_its_end_starts_a_regime() -> None:
    """While the LR rises the phase is warmup; steps after it are the clean ones."""
    warmup = [0.1 * (i + 1) / 500 for i in range(500)]
    assert current_regime(history(warmup)).phase == "warmup"
    after = current_regime(history(warmup + [0.1] * 100))
    assert after.phase == "steady"
    assert after.measured_steps <= 110
    assert after.blocks[0].first_step >= 490


def test_cosine_decay_is_smooth_and_one_regime() -> None:
    """A decay by the schedule starts no new regime."""
    cosine = [0.05 * (1 + math.cos(math.pi * i / 1200)) for i in range(900)]
    regime = current_regime(history(cosine))
    assert regime.phase == "lr_decay"
    assert regime.measured_steps == 900


@pytest.mark.parametrize("after", [0.01, 0.2])
def test_a_jump_of_the_rate_starts_a_regime(after: float) -> None:
    """A step decay by 10, or a doubling: only the blocks since count."""
    regime = current_regime(history([0.1] * 300 + [after] * 50))
    assert regime.measured_steps == 50
    assert regime.phase == "steady"


def test_any_change_of_the_batch_starts_a_regime() -> None:
    """64 to 72 is a change, however small, where sizes are fixed."""
    blocks = history([0.1] * 300) + blocks_of(
        [StepMoments(4.0, 0.01)] * 50, global_batch_size=72, first_step=300
    )
    assert current_regime(blocks).measured_steps == 50


def test_token_counts_vary_by_nature() -> None:
    """In tokens, or where sizes vary from step to step, under 20% is no change."""
    (a,) = blocks_of([StepMoments(4.0, 0.01)], global_batch_size=1000)
    b = a.model_copy(update={"global_batch_size": 1100.0})
    assert batch_changed(a, b)
    tokens = {"batch_unit": "tokens"}
    assert not batch_changed(a.model_copy(update=tokens), b.model_copy(update=tokens))
    assert not batch_changed(a.model_copy(update={"uneven_steps": True}), b)
    assert batch_changed(a.model_copy(update=tokens), b)


def test_a_run_without_rates_or_blocks_is_steady() -> None:
    """Nothing is made up where nothing was reported."""
    blocks = blocks_of([StepMoments(4.0, 0.01)] * 50, learning_rates=None)
    regime = current_regime(blocks)
    assert (regime.phase, regime.learning_rate, regime.measured_steps) == ("steady", None, 50)
    assert current_regime([]).blocks == ()
