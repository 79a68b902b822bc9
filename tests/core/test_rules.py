"""Every rule against the figures its paper prints, and what must hold whatever the numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescale.errors import InvalidInputError
from noisescale.rules import (
    OPTIMIZER_RULES,
    RULES,
    BatchChange,
    adam_square_root_betas,
    batch_size_instead_of_decay,
    examples_over_minimum,
    goyal_learning_rate,
    kaplan_critical_batch_size,
    learning_rates,
    momentum_correction,
    noise_scale_from_efficiency,
    primary,
    ramp,
    ramp_steps,
    sample_efficiency,
    saturating_learning_rate,
    sgd_noise_scale,
    speed,
    steps_over_minimum,
    time_optimal_batch_size,
    warmup_learning_rates,
    weight_decay_same_timescale,
)

SIZES = st.floats(1, 1e7)
SCALES = st.floats(1e-3, 1e9)


@pytest.mark.parametrize(
    ("before", "after", "noise_scale", "factors", "steps", "examples"),
    [
        (256, 2048, 2000, (8, 4.458, 2.828, 2.112, 1.576), 0.2243, 1.794),
        (256, 8192, 30000, (32, 25.35, 5.657, 5.035, 4.481), None, None),
        (256, 1024, 256, (4, 1.6, 2, 1.265, 0.8), None, None),
    ],
)
def test_launch_planning(
    before: float,
    after: float,
    noise_scale: float,
    factors: tuple[float, ...],
    steps: float | None,
    examples: float | None,
) -> None:
    """The worked plans: linear, kE, sqrt, sqrt(kE), surge."""
    change = BatchChange(before=before, after=after, noise_scale=noise_scale)
    found = learning_rates(learning_rate=1.0, change=change)
    assert list(found) == ["linear", "noise_aware_sgd", "square_root", "noise_aware_adam", "surge"]
    assert list(found.values()) == pytest.approx(factors, rel=5e-4)
    if steps is not None:
        assert change.steps_multiplier == pytest.approx(steps, rel=5e-4)
        assert change.examples_multiplier == pytest.approx(examples, rel=5e-4)


@pytest.mark.parametrize(
    ("scale", "iterations", "noise_scale"),
    [(16, 33.2, 21.3e3), (32, 18.7, 24.0e3), (64, 11.2, 27.1e3), (128, 7.29, 30.2e3)],
)
def test_adascale_table_2_implies_the_noise_scale_of_imagenet(
    scale: int, iterations: float, noise_scale: float
) -> None:
    """Inverting E of AdaScale's iteration counts gives Bn near McCandlish's measured 30k."""
    efficiency = 451 / (iterations * scale)
    found = noise_scale_from_efficiency(before=256, after=256 * scale, efficiency=efficiency)
    assert found == pytest.approx(noise_scale, rel=0.01)


@pytest.mark.parametrize(("batch", "rate"), [(32, 0.0675), (96, 0.135), (256, 0.1964), (1024, 0.2469)])
def test_svhn_fit(batch: int, rate: float) -> None:
    """McCandlish appendix D: eps = 0.27 B/(96 + B)."""
    assert saturating_learning_rate(global_batch_size=batch, noise_scale=96, largest=0.27) == pytest.approx(
        rate, abs=6e-5
    )


@pytest.mark.parametrize(("loss", "tokens"), [(4, 2.717e5), (3, 1.069e6), (2.5, 2.547e6), (2, 7.371e6)])
def test_kaplan(loss: float, tokens: float) -> None:
    """B_crit of a language model from its loss."""
    assert kaplan_critical_batch_size(loss=loss) == pytest.approx(tokens, rel=5e-4)


def test_goyal() -> None:
    """0.1 B/256: 3.2 at 8192."""
    assert goyal_learning_rate(global_batch_size=8192) == pytest.approx(3.2)
    assert momentum_correction(before=0.1, after=0.4) == pytest.approx(4)


def test_smith() -> None:
    """(eta .1, N 50000, B 128, m .9) -> g = 389.6; a decay by 5 is a batch times 5, up to the lower end."""
    g = sgd_noise_scale(learning_rate=0.1, dataset_size=50_000, global_batch_size=128, momentum=0.9)
    assert g == pytest.approx(389.6, abs=0.05)
    bigger = sgd_noise_scale(learning_rate=0.1, dataset_size=5e9, global_batch_size=640, momentum=0.9)
    decayed = sgd_noise_scale(learning_rate=0.02, dataset_size=5e9, global_batch_size=128, momentum=0.9)
    assert bigger == pytest.approx(decayed, rel=1e-5)
    assert batch_size_instead_of_decay(global_batch_size=128, decay_factor=5, noise_scale_lower=1e4) == 640
    assert batch_size_instead_of_decay(global_batch_size=128, decay_factor=5, noise_scale_lower=300) == 300
    assert batch_size_instead_of_decay(global_batch_size=128, decay_factor=5, noise_scale_lower=60) == 128


def test_time_optimal_batch() -> None:
    """(.05, .001, R = 8, Bn = 2000) -> 894."""
    found = time_optimal_batch_size(
        fixed_step_s=0.05, step_s_per_example=0.001, dp_world_size=8, noise_scale=2000
    )
    assert found == pytest.approx(894, abs=0.5)


def test_at_the_noise_scale_everything_is_double() -> None:
    """At B = Bn: twice the least steps and examples; doubling still saves 25% of the steps."""
    assert steps_over_minimum(global_batch_size=500, noise_scale=500) == 2
    assert examples_over_minimum(global_batch_size=500, noise_scale=500) == 2
    assert BatchChange(before=500, after=1000, noise_scale=500).steps_multiplier == pytest.approx(0.75)


def test_the_lesson_ramp() -> None:
    """Linear scaling with warmup from 0.1 over 5 steps on 4 ranks: .16 .22 .28 .34 .40."""
    change = BatchChange(before=32, after=128, noise_scale=1e6)
    target = 0.1 * RULES["linear"](change)
    assert ramp(start=0.1, end=target, steps=5) == pytest.approx([0.16, 0.22, 0.28, 0.34, 0.40])


def test_malladi_betas() -> None:
    """beta' = 1 - k(1 - beta), eps' = eps/sqrt(k); nothing to say where a beta would be negative."""
    assert adam_square_root_betas(ratio=4, beta1=0.9, beta2=0.99, epsilon=1e-8) == pytest.approx(
        (0.6, 0.96, 5e-9)
    )
    assert adam_square_root_betas(ratio=16, beta1=0.9, beta2=0.999, epsilon=1e-8) is None


def test_ramp_lengths() -> None:
    """100 steps for SGD, 1/(1 - beta2) for Adam-likes."""
    assert ramp_steps(optimizer="sgd", beta2=None) == 100
    assert ramp_steps(optimizer="adamw", beta2=0.95) == 20
    assert ramp_steps(optimizer="adam", beta2=None) == 1000
    assert ramp_steps(optimizer="lion", beta2=0.99) == 100


def test_a_warmup_in_examples_is_shorter_in_steps_at_a_bigger_batch() -> None:
    """The same schedule, whatever the batch."""
    small = warmup_learning_rates(peak=0.4, start=0.1, examples=1280, global_batch_size=64)
    big = warmup_learning_rates(peak=0.4, start=0.1, examples=1280, global_batch_size=256)
    assert (len(small), len(big)) == (20, 5)
    assert big == pytest.approx(small[3::4])


@given(batch=SIZES, noise_scale=SCALES, rate=st.floats(1e-8, 1e3))
def test_no_change_is_factor_one(batch: float, noise_scale: float, rate: float) -> None:
    """k -> 1 leaves the LR, by every rule."""
    change = BatchChange(before=batch, after=batch, noise_scale=noise_scale)
    assert list(learning_rates(learning_rate=rate, change=change).values()) == pytest.approx([rate] * 5)
    assert primary(change, exponent=1) == pytest.approx(1)


@given(before=SIZES, growth=st.floats(1, 1000), noise_scale=SCALES)
def test_rules_bracket_each_other(before: float, growth: float, noise_scale: float) -> None:
    """On a raise: 1 <= sqrt(kE) <= kE <= k, sqrt(kE) <= sqrt(k), and surge is below both."""
    change = BatchChange(before=before, after=before * growth, noise_scale=noise_scale)
    linear, aware, root, aware_root, surge = (rule(change) for rule in RULES.values())
    slack = 1 + 1e-9
    assert aware_root * slack >= 1
    assert aware_root <= aware * slack
    assert aware <= linear * slack
    assert aware_root <= root * slack
    assert surge <= aware_root * slack
    assert primary(change, exponent=1.0) == pytest.approx(aware)
    assert primary(change, exponent=0.5) == pytest.approx(aware_root)


@given(before=SIZES, shrink=st.floats(0.001, 1), noise_scale=SCALES)
def test_a_smaller_batch_takes_the_plain_rule(before: float, shrink: float, noise_scale: float) -> None:
    """min(1, E): a shrinking batch keeps no more LR than the plain rule leaves it."""
    change = BatchChange(before=before, after=before * shrink, noise_scale=noise_scale)
    assert primary(change, exponent=1.0) == pytest.approx(change.ratio)
    assert primary(change, exponent=0.5) == pytest.approx(math.sqrt(change.ratio))


@given(before=SIZES, after=SIZES, noise_scale=SCALES, unit=st.floats(1e-3, 1e3))
def test_rules_have_no_unit(before: float, after: float, noise_scale: float, unit: float) -> None:
    """Examples or tokens: scaling every size alike changes nothing."""
    one = BatchChange(before=before, after=after, noise_scale=noise_scale)
    other = BatchChange(before=before * unit, after=after * unit, noise_scale=noise_scale * unit)
    for rule in RULES.values():
        assert rule(other) == pytest.approx(rule(one), rel=1e-9)


@given(batch=SIZES, noise_scale=SCALES)
def test_speed_and_efficiency_add_to_one(batch: float, noise_scale: float) -> None:
    """And (S/Smin - 1)(E/Emin - 1) = 1."""
    total = sample_efficiency(global_batch_size=batch, noise_scale=noise_scale) + speed(
        global_batch_size=batch, noise_scale=noise_scale
    )
    assert total == pytest.approx(1)
    steps = steps_over_minimum(global_batch_size=batch, noise_scale=noise_scale)
    assert steps - 1 == pytest.approx(noise_scale / batch, rel=1e-6, abs=1e-12)


@given(before=SIZES, growth=st.floats(1.01, 1000), noise_scale=SCALES, decay=st.floats(1e-4, 1))
def test_weight_decay_keeps_adamws_timescale(
    before: float, growth: float, noise_scale: float, decay: float
) -> None:
    """tau = B/(eta lambda D) is the same before and after."""
    change = BatchChange(before=before, after=before * growth, noise_scale=noise_scale)
    factor = primary(change, exponent=0.5)
    new = weight_decay_same_timescale(weight_decay=decay, change=change, learning_rate_factor=factor)
    assert change.after / (factor * new) == pytest.approx(change.before / decay)


def test_every_family_has_a_rule_with_a_source() -> None:
    """And LARS, LAMB and the unknown are never more than low confidence."""
    assert {name: rule.exponent for name, rule in OPTIMIZER_RULES.items()} == {
        "sgd": 1.0,
        "adam": 0.5,
        "adamw": 0.5,
        "lars": 1.0,
        "lamb": 0.5,
        "sign": 0.5,
        "lion": 0.5,
        "muon": 0.5,
        "other": None,
    }
    assert all(rule.source for rule in OPTIMIZER_RULES.values())
    assert {name for name, rule in OPTIMIZER_RULES.items() if rule.confidence == "low"} == {
        "lars",
        "lamb",
        "other",
    }


def test_infinite_noise_scale_is_the_plain_rule() -> None:
    """Unbounded noise: E is 1."""
    change = BatchChange(before=10, after=20, noise_scale=math.inf)
    assert change.efficiency == 1
    assert speed(global_batch_size=10, noise_scale=math.inf) == 0


@pytest.mark.parametrize(
    ("before", "after", "noise_scale", "field"),
    [
        (0, 1, 1, "before"),
        (1, math.inf, 1, "after"),
        (1, 1, -1, "noise_scale"),
        (1, 1, math.nan, "noise_scale"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    before: float, after: float, noise_scale: float, field: str
) -> None:
    """Each names its field."""
    with pytest.raises(InvalidInputError) as caught:
        BatchChange(before=before, after=after, noise_scale=noise_scale)
    assert caught.value.field == field


def test_efficiency_out_of_range_is_refused() -> None:
    """No noise scale explains an efficiency above 1."""
    with pytest.raises(InvalidInputError, match="between"):
        noise_scale_from_efficiency(before=256, after=512, efficiency=1.2)
    with pytest.raises(InvalidInputError, match="at least 1 step"):
        ramp(start=0.1, end=0.2, steps=0)
