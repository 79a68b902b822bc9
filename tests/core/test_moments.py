"""One step's measured square norms to unbiased moments."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from noisescale.errors import InvalidInputError
from noisescale.moments import (
    SampleGeometry,
    gaussian_step_variance,
    noise_scale,
    step_moments,
    two_batch_moments,
)
from tests.synthetic import NOISE_SCALE, averages, gaussian_moments

SIZES = st.lists(st.integers(1, 500), min_size=2, max_size=8)
SQUARES = st.floats(1e-6, 1e6)


def two_layer_gain(first: list[float], second: list[float]) -> float:
    """AdaScale's gain of Linear(2, 2) with loss out.sum(), from one step of two micro-batches."""
    # d(loss)/dW has both rows equal to the input, d(loss)/db is 1 for both outputs.
    gradients = np.array([[*x, *x, 1, 1] for x in (first, second)], dtype=float)
    moments = step_moments(
        local_sq=float((gradients**2).sum(axis=1).mean()),
        global_sq=float((gradients.mean(axis=0) ** 2).sum()),
        geometry=SampleGeometry.of(counts=[1, 1], weights=[0.5, 0.5]),
    )
    s, g = moments.trace_covariance, max(moments.true_grad_sq_norm, 0.0)
    return (s + g) / (s / 2 + g)


@pytest.mark.parametrize(
    ("local_sq", "global_sq", "small", "big", "signal", "trace", "ratio"),
    [
        (10, 2.5, 32, 256, 1.428571, 274.285714, 192),
        (1, 0.25, 16, 128, 0.142857, 13.714286, 96),
        (5, 4.9, 8, 64, 4.885714, 0.914286, 0.1871),
        (2, 0.2, 10, 100, 0, 20, None),
    ],
)
def test_two_batch_estimator_gives_the_published_figures(
    local_sq: float,
    global_sq: float,
    small: float,
    big: float,
    signal: float,
    trace: float,
    ratio: float | None,
) -> None:
    """McCandlish appendix A.1, and no crash where |G|^2 is zero."""
    moments = two_batch_moments(local_sq=local_sq, global_sq=global_sq, small=small, big=big)
    assert moments.true_grad_sq_norm == pytest.approx(signal, abs=1e-6)
    assert moments.trace_covariance == pytest.approx(trace, rel=1e-6)
    found = noise_scale(
        trace_covariance=moments.trace_covariance, true_grad_sq_norm=moments.true_grad_sq_norm
    )
    if ratio is None:
        assert moments.true_grad_sq_norm == pytest.approx(0, abs=1e-12)
        assert noise_scale(trace_covariance=20, true_grad_sq_norm=0) is None
    else:
        assert found == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(
    ("first", "second", "gain"),
    [
        ([1, 0], [0, 1], 4 / 3),
        ([-1, 1], [1, -1], 2.0),
        ([1, 4], [5, 0.5], 1.46888),
        ([-0.2, 3], [5, 0.5], 1.84729),
    ],
)
def test_moments_give_adascales_gains(first: list[float], second: list[float], gain: float) -> None:
    """AdaScale's gains (a one-step gain takes a negative |G|^2 as 0) follow from the same two moments."""
    assert two_layer_gain(first, second) == pytest.approx(gain, rel=1e-5)


@given(size=st.integers(1, 1000), ranks=st.integers(2, 64), local=SQUARES, part=st.floats(0.01, 1))
def test_equal_samples_give_the_two_batch_estimator(size: int, ranks: int, local: float, part: float) -> None:
    """The general weighted estimator at w = 1/R, n = b is McCandlish's."""
    general = step_moments(
        local_sq=local,
        global_sq=local * part,
        geometry=SampleGeometry.equal_weights(samples=ranks, sum_inverse_counts=ranks / size),
    )
    special = two_batch_moments(local_sq=local, global_sq=local * part, small=size, big=size * ranks)
    assert general.trace_covariance == pytest.approx(special.trace_covariance, rel=1e-9, abs=1e-12)
    assert general.true_grad_sq_norm == pytest.approx(
        special.true_grad_sq_norm, rel=1e-9, abs=1e-9 * max(local, 1)
    )


@given(counts=SIZES)
def test_geometry_shortcuts_agree_with_the_general_form(counts: list[int]) -> None:
    """1/K weights need sum 1/n_k only, n_k/N weights need N only."""
    k, total = len(counts), sum(counts)
    equal = SampleGeometry.of(counts=counts, weights=[1 / k] * k)
    short = SampleGeometry.equal_weights(samples=k, sum_inverse_counts=sum(1 / n for n in counts))
    assert short.spread == pytest.approx(equal.spread)
    assert short.residual == pytest.approx(equal.residual)
    weighted = SampleGeometry.of(counts=counts, weights=[n / total for n in counts])
    short = SampleGeometry.count_weights(samples=k, total_count=total)
    assert short.spread == pytest.approx(weighted.spread)
    assert short.residual == pytest.approx(weighted.residual)


@given(counts=SIZES, seed=st.integers(0, 100), scale=st.floats(1e-8, 1e8))
def test_scaling_the_loss_scales_both_moments_alike(counts: list[int], seed: int, scale: float) -> None:
    """B_noise has no absolute scale in it: gradients times c give moments times c^2."""
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal((len(counts), 5))
    geometry = SampleGeometry.of(counts=counts, weights=[1 / len(counts)] * len(counts))

    def moments(g: np.ndarray) -> tuple[float, float]:
        found = step_moments(
            local_sq=float((g**2).sum(axis=1).mean()),
            global_sq=float((g.mean(axis=0) ** 2).sum()),
            geometry=geometry,
        )
        return found.trace_covariance, found.true_grad_sq_norm

    s, g = moments(gradients)
    scaled_s, scaled_g = moments(gradients * scale)
    assert scaled_s == pytest.approx(s * scale**2, rel=1e-6)
    assert scaled_g == pytest.approx(g * scale**2, rel=1e-6, abs=1e-9 * scale**2 * abs(s))


@given(counts=SIZES, seed=st.integers(0, 100))
def test_ranks_may_be_permuted(counts: list[int], seed: int) -> None:
    """Which rank held which sample says nothing."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(counts))
    weights = rng.dirichlet(np.ones(len(counts)))
    one = SampleGeometry.of(counts=counts, weights=list(weights))
    other = SampleGeometry.of(counts=[counts[i] for i in order], weights=[weights[i] for i in order])
    assert other.spread == pytest.approx(one.spread, rel=1e-12)
    assert other.residual == pytest.approx(one.residual, rel=1e-12)


def test_ratio_of_means_is_right_where_other_ratios_are_not() -> None:
    """On the synthetic of true value 400: ratio of means within 3%, the tempting others far off."""
    moments = gaussian_moments(steps=60_000, counts=[16] * 4, seed=1)
    s, g = averages(moments)
    signals = np.array([m.true_grad_sq_norm for m in moments])
    traces = np.array([m.trace_covariance for m in moments])
    assert s / g == pytest.approx(NOISE_SCALE, rel=0.03)
    assert (signals < 0).mean() == pytest.approx(0.25, abs=0.02)
    assert abs((traces / signals).mean() / NOISE_SCALE - 1) > 0.5
    assert s / np.maximum(signals, 0).mean() == pytest.approx(328, rel=0.05)


@pytest.mark.parametrize("counts", [[16] * 4, [4, 8, 16, 36], [64, 64]])
@pytest.mark.parametrize("weighting", ["equal", "by count"])
def test_uneven_samples_are_unbiased(counts: list[int], weighting: str) -> None:
    """Within 3% of 400 for any sizes and both weightings."""
    total = sum(counts)
    weights = [n / total for n in counts] if weighting == "by count" else None
    s, g = averages(gaussian_moments(steps=60_000, counts=counts, seed=2, weights=weights))
    assert s / g == pytest.approx(NOISE_SCALE, rel=0.03)


def test_mean_count_instead_of_mean_inverse_inflates() -> None:
    """1 over the mean of n_k is off 1.86 times for n = (4, 8, 16, 36): the trap is a real one."""
    counts = [4, 8, 16, 36]
    right = SampleGeometry.of(counts=counts, weights=[0.25] * 4)
    wrong = SampleGeometry.equal_weights(samples=4, sum_inverse_counts=4 / 16)
    # The expected A - Q and Q under the truth, read with the wrong geometry:
    trace = 4.0 * right.spread / wrong.spread
    signal = 0.01 + 4.0 * right.residual - trace * wrong.residual
    assert trace / signal / NOISE_SCALE == pytest.approx(1.86, abs=0.01)


def test_step_variance_matches_monte_carlo() -> None:
    """The Gaussian formulas for the variance of one step's estimates."""
    moments = gaussian_moments(steps=60_000, counts=[16] * 4, seed=3)
    s = np.array([m.trace_covariance for m in moments])
    g = np.array([m.true_grad_sq_norm for m in moments])
    per_coordinate = 4.0 / 64
    expected = gaussian_step_variance(
        samples=4,
        global_batch_size=64,
        trace_sigma_sq=64 * per_coordinate**2,
        grad_sigma_grad=0.01 * per_coordinate,
    )
    assert s.var() == pytest.approx(expected.trace_covariance, rel=0.03)
    assert g.var() == pytest.approx(expected.true_grad_sq_norm, rel=0.03)
    assert np.cov(s, g)[0, 1] == pytest.approx(expected.covariance, rel=0.05)


def test_more_and_smaller_samples_are_less_noisy() -> None:
    """R = 2, M = 8 per micro-batch has sqrt(15) times less noise in tr(Sigma) than per rank."""
    per_rank = gaussian_step_variance(samples=2, global_batch_size=64, trace_sigma_sq=1, grad_sigma_grad=1)
    per_micro = gaussian_step_variance(samples=16, global_batch_size=64, trace_sigma_sq=1, grad_sigma_grad=1)
    assert math.sqrt(per_rank.trace_covariance / per_micro.trace_covariance) == pytest.approx(math.sqrt(15))


def test_one_sample_is_refused() -> None:
    """A single sample has no spread, and the error says what to do."""
    with pytest.raises(InvalidInputError, match="at least 2 ranks"):
        step_moments(local_sq=1, global_sq=1, geometry=SampleGeometry.of(counts=[8], weights=[1.0]))


@pytest.mark.parametrize(
    ("counts", "weights", "field"),
    [([4, 4], [1.0], "weights"), ([4, 0], [0.5, 0.5], "counts"), ([4, 4], [0.5, 0.6], "weights")],
)
def test_bad_geometry_is_refused(counts: list[float], weights: list[float], field: str) -> None:
    """Sizes and weights that cannot be right name their field."""
    with pytest.raises(InvalidInputError) as caught:
        SampleGeometry.of(counts=counts, weights=weights)
    assert caught.value.field == field


def test_two_batch_sizes_must_be_ordered() -> None:
    """b < B, or the difference means nothing."""
    with pytest.raises(InvalidInputError, match="0 < small < big"):
        two_batch_moments(local_sq=1, global_sq=1, small=64, big=64)


def test_quantile_is_students() -> None:
    """The series for Student's t is within 0.2% of scipy from 5 degrees of freedom on."""
    from noisescale.estimate import student_t_quantile

    for degrees in (5, 7, 19, 100, 999):
        for probability in (0.9, 0.975, 0.995):
            assert student_t_quantile(probability, degrees) == pytest.approx(
                stats.t.ppf(probability, degrees), rel=2e-3
            )
