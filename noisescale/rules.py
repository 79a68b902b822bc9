"""Learning-rate and batch rules, each one line, with its source.

Throughout, k = B1/B0 is the ratio of the new global batch to the old, Bn the noise scale, and
E = (B0 + Bn) / (B1 + Bn) how much of each example's use survives the change.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from noisescale.errors import InvalidInputError
from noisescale.wire import OptimizerFamily

Confidence = Literal["low", "medium"]

DEFAULT_BETA2 = 0.999
"""PyTorch's, where an Adam's beta2 is not reported."""


@dataclass(frozen=True, slots=True)
class BatchChange:
    """A change of the global batch at a known noise scale, all in the same unit.

    Raises:
        InvalidInputError: A size is not positive and finite, or the noise scale is negative.
    """

    before: float
    after: float
    noise_scale: float

    def __post_init__(self) -> None:
        for field, value in (("before", self.before), ("after", self.after)):
            if not (value > 0 and math.isfinite(value)):
                raise InvalidInputError(f"a batch size must be positive and finite, got {value}", field=field)
        if not self.noise_scale >= 0:
            raise InvalidInputError(
                f"the noise scale must be 0 or more, got {self.noise_scale}; pass its lower or upper end",
                field="noise_scale",
            )

    @property
    def ratio(self) -> float:
        """k = B1/B0."""
        return self.after / self.before

    @property
    def efficiency(self) -> float:
        """E; 1 for an infinite noise scale, 1/k for none. Above 1 when the batch shrinks."""
        if math.isinf(self.noise_scale):
            return 1.0
        return (self.before + self.noise_scale) / (self.after + self.noise_scale)

    @property
    def steps_multiplier(self) -> float:
        """Steps needed after, over steps needed before, for the same progress: 1/(kE)."""
        return 1 / (self.ratio * self.efficiency)

    @property
    def examples_multiplier(self) -> float:
        """Examples needed after, over examples needed before, for the same progress: 1/E."""
        return 1 / self.efficiency


def linear(change: BatchChange) -> float:
    """LR factor k: Krizhevsky 2014 (arXiv 1404.5997), Goyal et al. 2017 (arXiv 1706.02677)."""
    return change.ratio


def noise_aware_sgd(change: BatchChange) -> float:
    """LR factor kE: McCandlish 2018 eq 2.6; the AdaScale gain; k times Pollux's efficiency."""
    return change.ratio * change.efficiency


def square_root(change: BatchChange) -> float:
    """LR factor sqrt(k): Hoffer 2017 (arXiv 1705.08741); Malladi 2022 (arXiv 2205.10287) for Adam."""
    return math.sqrt(change.ratio)


def noise_aware_adam(change: BatchChange) -> float:
    """LR factor sqrt(kE): McCandlish 2018's fit form (appendix D) with alpha = 1/2."""
    return math.sqrt(change.ratio * change.efficiency)


def surge(change: BatchChange) -> float:
    """LR factor sqrt(k) E, experimental: Li 2024 (arXiv 2405.14578) eq 2.

    Its own noise scale is a sign-SGD, Hessian-weighted one; B_simple stands in for it here.
    """
    return math.sqrt(change.ratio) * change.efficiency


RULES: dict[str, Callable[[BatchChange], float]] = {
    "linear": linear,
    "noise_aware_sgd": noise_aware_sgd,
    "square_root": square_root,
    "noise_aware_adam": noise_aware_adam,
    "surge": surge,
}


def primary(change: BatchChange, *, exponent: float) -> float:
    """The LR factor that is advised: (k min(1, E))^alpha.

    Capped at E = 1, so that a shrinking batch never keeps more of its LR than the plain rule
    gives it.
    """
    return math.pow(change.ratio * min(1.0, change.efficiency), exponent)


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """How an optimizer's learning rate goes with the batch.

    Attributes:
        exponent: alpha of the primary rule; None where no rule is known, so no LR is advised.
        rule: The key of RULES that the primary rule equals when the batch grows.
        plain_rule: The key of RULES it tends to far below the noise scale.
        confidence: The best that any advice by this rule can have.
        source: Where exponent and confidence are from.
    """

    exponent: float | None
    rule: str | None
    plain_rule: str | None
    confidence: Confidence
    source: str


_SGD = OptimizerRule(
    exponent=1.0,
    rule="noise_aware_sgd",
    plain_rule="linear",
    confidence="medium",
    source=(
        "McCandlish et al. 2018 (arXiv 1812.06162) eq 2.6; AdaScale, Johnson et al. 2020 (arXiv 2007.05105)"
    ),
)


def _half(confidence: Confidence, source: str) -> OptimizerRule:
    return OptimizerRule(
        exponent=0.5,
        rule="noise_aware_adam",
        plain_rule="square_root",
        confidence=confidence,
        source=source,
    )


_ADAM = _half(
    "medium",
    (
        "McCandlish et al. 2018 (arXiv 1812.06162) appendix D, alpha = 1/2; "
        "Malladi et al. 2022 (arXiv 2205.10287)"
    ),
)
_SIGN = _half("medium", "arXiv 2602.03001 scales the learning rate by sqrt(B)")

OPTIMIZER_RULES: dict[OptimizerFamily, OptimizerRule] = {
    "sgd": _SGD,
    "adam": _ADAM,
    "adamw": _ADAM,
    "lars": OptimizerRule(
        exponent=1.0,
        rule="noise_aware_sgd",
        plain_rule="linear",
        confidence="low",
        source="You et al. 2017; Nado et al. 2021 (arXiv 2102.06356): standard optimizers match LARS",
    ),
    "lamb": _half(
        "low",
        (
            "You et al. 2020 (arXiv 1904.00962): square root, untuned, to 32k; "
            "Nado et al. 2021 (arXiv 2102.06356)"
        ),
    ),
    "sign": _SIGN,
    "lion": _SIGN,
    "muon": _SIGN,
    "other": OptimizerRule(
        exponent=None,
        rule=None,
        plain_rule=None,
        confidence="low",
        source="no learning-rate rule is known for this optimizer",
    ),
}


def sample_efficiency(*, global_batch_size: float, noise_scale: float) -> float:
    """The share of each example that is of use: Bn / (Bn + B). Adds to 1 with `speed`."""
    return 1 - speed(global_batch_size=global_batch_size, noise_scale=noise_scale)


def speed(*, global_batch_size: float, noise_scale: float) -> float:
    """Progress of a step over the most a step can make: B / (B + Bn)."""
    if math.isinf(noise_scale):
        return 0.0
    return global_batch_size / (global_batch_size + noise_scale)


def steps_over_minimum(*, global_batch_size: float, noise_scale: float) -> float:
    """S / S_min = 1 + Bn/B (McCandlish 2.11): 2 where the batch is at the noise scale."""
    return 1 + noise_scale / global_batch_size


def examples_over_minimum(*, global_batch_size: float, noise_scale: float) -> float:
    """E / E_min = 1 + B/Bn: 2 where the batch is at the noise scale."""
    return 1 + global_batch_size / noise_scale


def noise_scale_from_efficiency(*, before: float, after: float, efficiency: float) -> float:
    """The noise scale that an observed E implies; the inverse of BatchChange.efficiency.

    Raises:
        InvalidInputError: The efficiency is not strictly between B0/B1 and 1.
    """
    low, high = sorted((before / after, 1.0))
    if not low < efficiency < high:
        raise InvalidInputError(
            f"an efficiency between {low:g} and {high:g} was expected for {before:g} to {after:g}, "
            f"got {efficiency:g}",
            field="efficiency",
        )
    return (after * efficiency - before) / (1 - efficiency)


def saturating_learning_rate(
    *, global_batch_size: float, noise_scale: float, largest: float, exponent: float = 1.0
) -> float:
    """eps(B) = eps_max / (1 + Bn/B)^alpha: McCandlish 2018 eq 2.6 and appendix D."""
    return largest / math.pow(1 + noise_scale / global_batch_size, exponent)


def time_optimal_batch_size(
    *, fixed_step_s: float, step_s_per_example: float, dp_world_size: int, noise_scale: float
) -> float:
    """The global batch that trains fastest when a step takes c0 + c1 B/R: sqrt(c0 R Bn / c1).

    Args:
        fixed_step_s: c0, seconds a step takes whatever its size.
        step_s_per_example: c1, seconds per example of one rank's batch.
    """
    return math.sqrt(fixed_step_s * dp_world_size * noise_scale / step_s_per_example)


def sgd_noise_scale(
    *, learning_rate: float, dataset_size: float, global_batch_size: float, momentum: float
) -> float:
    """g = eta (N/B - 1) / (1 - m): the scale of SGD's own fluctuations (Smith et al. 2018, 1711.00489).

    Not the gradient noise scale: this one is set by the hyper-parameters. Equal g, equal fluctuations.
    """
    return learning_rate * (dataset_size / global_batch_size - 1) / (1 - momentum)


def batch_size_instead_of_decay(
    *, global_batch_size: float, decay_factor: float, noise_scale_lower: float
) -> float:
    """The batch that does what dividing the LR by `decay_factor` would: B f (Smith et al. 2018).

    Kept under the noise scale's lower bound, beyond which a larger batch stops paying; never
    below the present batch.
    """
    return max(global_batch_size, min(global_batch_size * decay_factor, noise_scale_lower))


def goyal_learning_rate(*, global_batch_size: float) -> float:
    """The ImageNet reference rate 0.1 B/256 (Goyal et al. 2017); linear held to 8192 and broke above."""
    return 0.1 * global_batch_size / 256


def momentum_correction(*, before: float, after: float) -> float:
    """What to multiply a velocity with folded-in LR by, when the LR jumps (Goyal et al. 2017)."""
    return after / before


def kaplan_critical_batch_size(*, loss: float) -> float:
    """B_crit in tokens of a language model at `loss` nats: 2e8 / L^(1/0.21) (Kaplan et al. 2020)."""
    return 2e8 / math.pow(loss, 1 / 0.21)


def adam_square_root_betas(
    *, ratio: float, beta1: float, beta2: float, epsilon: float
) -> tuple[float, float, float] | None:
    """Malladi et al. 2022: beta_i' = 1 - k (1 - beta_i), eps' = eps / sqrt(k).

    None where a beta would fall below 0, which is where the rule has nothing to say.
    """
    first = 1 - ratio * (1 - beta1)
    second = 1 - ratio * (1 - beta2)
    if first < 0 or second < 0:
        return None
    return first, second, epsilon / math.sqrt(ratio)


def weight_decay_same_timescale(
    *, weight_decay: float, change: BatchChange, learning_rate_factor: float
) -> float:
    """lambda k (eta_old / eta_new): keeps AdamW's tau = B / (eta lambda D) (Bergsma et al. 2025)."""
    return weight_decay * change.ratio / learning_rate_factor


def ramp(*, start: float, end: float, steps: int) -> list[float]:
    """The LR of each step of a linear ramp; the last is `end`, `start` itself is not repeated.

    From 0.1 to 0.4 over 5 steps: .16 .22 .28 .34 .40.
    """
    if steps < 1:
        raise InvalidInputError(f"a ramp needs at least 1 step, got {steps}", field="steps")
    return [start + (end - start) * step / steps for step in range(1, steps + 1)]


def ramp_steps(*, optimizer: OptimizerFamily, beta2: float | None) -> int:
    """Over how many steps to move the LR: 1/(1 - beta2) for Adam-likes, 100 for the rest."""
    if optimizer in ("adam", "adamw", "lamb"):
        return max(1, round(1 / (1 - (DEFAULT_BETA2 if beta2 is None else beta2))))
    return 100


def learning_rates(*, learning_rate: float, change: BatchChange) -> dict[str, float]:
    """The learning rate by every rule."""
    return {name: learning_rate * rule(change) for name, rule in RULES.items()}


def warmup_learning_rates(
    *, peak: float, start: float, examples: float, global_batch_size: float
) -> Sequence[float]:
    """A linear warmup that is stated in examples, as one LR per step of the given batch.

    A schedule in examples stays the same schedule when the batch changes; one in steps does not.
    """
    return ramp(start=start, end=peak, steps=max(1, math.ceil(examples / global_batch_size)))
