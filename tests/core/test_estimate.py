"""Blocks to a noise scale with its interval: coverage is the proof."""

import numpy as np
import pytest

from noisescale.blocks import merge_blocks
from noisescale.errors import InvalidInputError
from noisescale.estimate import estimate, estimate_all
from noisescale.moments import StepMoments
from tests.synthetic import NOISE_SCALE, blocks_of, gaussian_moments, normal_moments

RUNS = 600


@pytest.mark.parametrize(
    ("cv", "correlation", "least", "most"),
    [
        (1.0, 0.0, 0.93, 0.97),
        (3.0, 0.0, 0.92, 0.975),
        (6.0, 0.0, 0.90, 0.98),
        (1.0, 0.8, 0.84, 0.97),
    ],
)
def test_interval_covers_the_truth(cv: float, correlation: float, least: float, most: float) -> None:
    """Of 600 runs of 400 steps, the share whose 95% interval holds the true value."""
    rng = np.random.default_rng(20181214)
    held = 0
    for _ in range(RUNS):
        moments = normal_moments(steps=400, cv=cv, correlation=correlation, rng=rng)
        found = estimate(blocks_of(moments))
        held += found.lower <= NOISE_SCALE and (found.upper is None or found.upper >= NOISE_SCALE)
    assert least <= held / RUNS <= most, held / RUNS


def test_lower_end_holds_far_above_the_batch() -> None:
    """At a noise scale 1000 times what the batch resolves, the lower end is still right, upper unbounded."""
    rng = np.random.default_rng(5)
    wrong = unbounded = 0
    for _ in range(RUNS):
        found = estimate(blocks_of(normal_moments(steps=400, cv=60.0, correlation=0.0, rng=rng)))
        wrong += found.lower > NOISE_SCALE
        unbounded += found.upper is None
    assert wrong / RUNS <= 0.05
    assert unbounded / RUNS >= 0.8


def test_estimate_of_the_synthetic_is_right() -> None:
    """Within 3% of 400 over a long window, and the interval holds it."""
    found = estimate(blocks_of(gaussian_moments(steps=20_000, counts=[16] * 4, seed=0)), window_steps=20_000)
    assert found.noise_scale == pytest.approx(NOISE_SCALE, rel=0.03)
    assert found.upper is not None
    assert found.lower < NOISE_SCALE < found.upper
    assert found.upper_confirmed
    assert found.interval_method == "blocks"
    assert found.measured_steps == 20_000


def test_every_step_a_block_agrees_with_tens() -> None:
    """The value is the same however the steps were cut into blocks; the interval nearly so."""
    moments = gaussian_moments(steps=800, counts=[16] * 4, seed=4)
    tens, ones = estimate(blocks_of(moments)), estimate(blocks_of(moments, block_steps=1))
    assert ones.noise_scale == pytest.approx(tens.noise_scale, rel=1e-12)
    assert ones.lower == pytest.approx(tens.lower, rel=1e-9)


def test_merging_old_blocks_keeps_the_value() -> None:
    """Compaction by age leaves the averages bit for bit but for the order of addition."""
    blocks = blocks_of(gaussian_moments(steps=800, counts=[16] * 4, seed=4))
    merged = [merge_blocks(blocks[i : i + 4]) for i in range(0, len(blocks), 4)]
    assert estimate(merged).noise_scale == pytest.approx(estimate(blocks).noise_scale, rel=1e-12)


def test_the_window_is_the_last_steps() -> None:
    """Old steps leave; the window is made of whole blocks."""
    blocks = blocks_of([StepMoments(1000.0, 1.0)] * 500 + [StepMoments(10.0, 1.0)] * 100)
    found = estimate(blocks, window_steps=100)
    assert found.noise_scale == pytest.approx(10)
    assert (found.first_step, found.last_step) == (500, 599)


def test_few_blocks_fall_back_to_steps_and_say_so() -> None:
    """Under 8 blocks the interval counts steps as independent; under 3 steps there is none."""
    moments = gaussian_moments(steps=40, counts=[16] * 4, seed=6)
    assert estimate(blocks_of(moments)).interval_method == "steps"
    none = estimate(blocks_of(moments[:2]))
    assert (none.interval_method, none.lower, none.upper) == ("none", 0.0, None)
    empty = estimate([])
    assert (empty.noise_scale, empty.measured_steps, empty.last_step) == (None, 0, None)


def test_a_negative_signal_is_unbounded_not_negative() -> None:
    """Where average |G|^2 is not positive there is no ratio, and the interval has no upper end."""
    rng = np.random.default_rng(7)
    signals = rng.normal(size=400)
    signals += -0.01 - signals.mean()
    moments = [StepMoments(4.0 + float(rng.normal()), float(g)) for g in signals]
    found = estimate(blocks_of(moments))
    assert found.true_grad_sq_norm is not None
    assert found.true_grad_sq_norm < 0
    assert found.noise_scale is None
    assert found.upper is None
    assert found.lower > 0
    nonsense = [StepMoments(4.0 + float(rng.normal()), float(rng.normal(-1, 0.1))) for _ in range(400)]
    found = estimate(blocks_of(nonsense))
    assert (found.noise_scale, found.lower, found.upper) == (None, 0.0, None)


def test_identical_data_on_all_ranks_has_no_positive_lower_end() -> None:
    """A tr(Sigma) of rounding errors is not told from zero."""
    rng = np.random.default_rng(8)
    moments = [StepMoments(float(rng.normal(0, 1e-9)), 1.0) for _ in range(400)]
    found = estimate(blocks_of(moments))
    assert found.lower == 0.0


def test_upper_end_of_one_lucky_stretch_is_not_confirmed() -> None:
    """Two halves that tell different stories do not confirm an upper end."""
    rng = np.random.default_rng(9)
    quiet = [
        StepMoments(4.0 + float(rng.normal(0, 0.1)), 0.04 + float(rng.normal(0, 0.001))) for _ in range(200)
    ]
    noisy = [StepMoments(4.0 + float(rng.normal(0, 0.1)), float(rng.normal(0, 0.02))) for _ in range(200)]
    found = estimate(blocks_of(quiet + noisy))
    assert found.upper is not None
    assert not found.upper_confirmed


def test_skipped_steps_are_counted_and_leave_averages_finite() -> None:
    """A non-finite step is not in the sums."""
    moments: list[StepMoments | None] = list(gaussian_moments(steps=300, counts=[16] * 4, seed=1))
    moments[150] = None
    found = estimate(blocks_of(moments))
    assert found.skipped_steps == 1
    assert found.measured_steps == 299


def test_all_at_once_are_those_of_one_by_one() -> None:
    """Every group and geometry of a run, sampled ones too, is estimated as by itself; the total is first."""
    blocks = []
    for index, block in enumerate(blocks_of(gaussian_moments(steps=600, counts=[16] * 4, seed=3))):
        (total,) = block.sums
        layer = total.model_copy(update={"group": "encoder", "trace_covariance": total.trace_covariance / 3})
        rare = total.model_copy(update={"geometry": "adam", "steps": 2})
        block = block.model_copy(update={"sums": (layer, total, *([rare] if index % 3 == 0 else []))})
        blocks.append(block)
    found = estimate_all(blocks, window_steps=300, every=7)
    assert [(one.group, one.geometry) for one in found] == [
        ("total", "euclidean"),
        ("encoder", "euclidean"),
        ("total", "adam"),
    ]
    for one in found:
        assert one == estimate(blocks, group=one.group, geometry=one.geometry, window_steps=300, every=7)
    assert found[2].measured_steps == 20
    assert estimate_all([]) == ()


def test_window_must_be_positive() -> None:
    """A window of nothing is refused."""
    with pytest.raises(InvalidInputError, match="window_steps"):
        estimate([], window_steps=0)
