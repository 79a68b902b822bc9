"""What is asked of a recommendation, and what it answers: the models of /recommend.

The field names are those of the JSON. Both serve a job with no server as well.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from noisescale.blocks import BatchUnit, Geometry
from noisescale.errors import InvalidInputError
from noisescale.estimate import LARGEST
from noisescale.history import Phase
from noisescale.rules import ramp
from noisescale.wire import OptimizerFamily, PositiveFloat, PositiveInt, TunedBase

Size = int | float
"""A batch size: whole numbers are kept as integers, so that they read as such."""

Action = Literal["raise", "lower", "hold", "lr_only"]
Reason = Literal[
    "lr_warmup",
    "too_few_steps",
    "signal_not_detected",
    "lr_off_rule",
    "below_noise_scale",
    "above_noise_scale",
    "in_band",
    "not_enough_evidence",
    "change_too_small",
    "no_layout_fits",
]
Confidence = Literal["none", "low", "medium"]
"""Never "high": the noise scale is an order-of-magnitude proxy for the critical batch size."""


def _absent() -> Any:
    """A field that is None, and not in the JSON, where it does not apply."""
    return Field(default=None, exclude_if=lambda value: value is None)


class NoiseScaleInterval(BaseModel):
    """A noise scale with its interval, in batch_units.

    Attributes:
        value: Point estimate; null where |G|^2 is not positive.
        lower: Lower end; 0 where nothing can be said.
        upper: Upper end; null = unbounded.
        upper_confirmed: Whether two disjoint stretches agree on the upper end.
        geometry: Which noise scale.
    """

    model_config = ConfigDict(frozen=True)

    value: Annotated[FiniteFloat, Field(gt=0, le=LARGEST)] | None = None
    lower: Annotated[FiniteFloat, Field(ge=0, le=LARGEST)]
    upper: Annotated[FiniteFloat, Field(gt=0, le=LARGEST)] | None = None
    upper_confirmed: bool = True
    geometry: Geometry = "euclidean"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        ends = [end for end in (self.lower, self.value, self.upper) if end is not None]
        if ends != sorted(ends):
            raise ValueError(
                f"noise_scale must be lower <= value <= upper, got lower {self.lower:g}, "
                f"value {self.value}, upper {self.upper}; leave out what is not known"
            )
        return self


class PlannedDecay(BaseModel):
    """A learning-rate decay that the schedule has ahead: eta is divided by `factor`."""

    model_config = ConfigDict(frozen=True)

    factor: Annotated[FiniteFloat, Field(gt=1)]
    dataset_size: PositiveFloat | None = None


class RecommendRequest(BaseModel):
    """The state of a run, measured or supposed, to be advised on.

    Attributes:
        global_batch_size: Over all data-parallel ranks and accumulation, per optimizer step.
        learning_rate: As it is now; null gives batch advice only.
        noise_scale: With its interval.
        dp_world_size, micro_batch_size, accumulation_steps: The layout; its product must be
            global_batch_size. Any one that is left out follows from the others.
        max_micro_batch_size: What fits in memory; the present micro_batch_size if left out.
        target_dp_world_size: Data-parallel ranks there will be.
        target_global_batch_size: A batch that is planned anyway: answered with every rule's LR
            for it, beside the advice.
        measured_steps: Clean steps since the last change of LR or batch.
        phase: What the LR is doing.
        batch_norm: BatchNorm keeps its statistics per rank, so such nets keep their micro_batch_size.
        tuned: A learning rate that was tuned, and its batch: switches the LR audit on.
        planned_decay: A decay ahead, which may be had as a batch increase instead.
    """

    model_config = ConfigDict(frozen=True)

    noise_scale: NoiseScaleInterval
    global_batch_size: PositiveFloat
    learning_rate: PositiveFloat | None = None
    optimizer: OptimizerFamily = "other"
    batch_unit: BatchUnit = "examples"
    dp_world_size: PositiveInt | None = None
    micro_batch_size: PositiveFloat | None = None
    accumulation_steps: PositiveInt | None = None
    max_micro_batch_size: PositiveInt | None = None
    target_dp_world_size: PositiveInt | None = None
    target_global_batch_size: PositiveFloat | None = None
    measured_steps: Annotated[int, Field(ge=0, le=2**53)]
    phase: Phase = "steady"
    batch_norm: bool = False
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    epsilon: Annotated[FiniteFloat, Field(ge=0)] | None = None
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] | None = None
    loss_reduction: Literal["mean", "global_mean"] | None = None
    tuned: TunedBase | None = None
    planned_decay: PlannedDecay | None = None


class WhatIf(BaseModel):
    """What a run reported, overridden: the query parameters of `GET /recommend?run=`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: OptimizerFamily | None = None
    global_batch_size: PositiveFloat | None = None
    learning_rate: PositiveFloat | None = None
    dp_world_size: PositiveInt | None = None
    micro_batch_size: PositiveFloat | None = None
    accumulation_steps: PositiveInt | None = None
    max_micro_batch_size: PositiveInt | None = None
    target_dp_world_size: PositiveInt | None = None
    target_global_batch_size: PositiveFloat | None = None
    phase: Phase | None = None
    batch_norm: bool | None = None
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] | None = None
    tuned_global_batch_size: PositiveFloat | None = None
    tuned_learning_rate: PositiveFloat | None = None
    planned_decay_factor: Annotated[FiniteFloat, Field(gt=1)] | None = None
    dataset_size: PositiveFloat | None = None


class Layout(BaseModel):
    """How a global batch is realised; the product of the three."""

    model_config = ConfigDict(frozen=True)

    micro_batch_size: int
    dp_world_size: int
    accumulation_steps: int


class SameBatchOption(Layout):
    """The always-available alternative when only the rank count changes."""

    learning_rate: float | None = None


class BatchInsteadOfDecay(BaseModel):
    """Smith et al. 2018: the planned decay as a batch increase at an unchanged LR.

    Attributes:
        global_batch_size: B f, kept under the noise scale's lower end.
        factor: The decay this batch stands for; less than the planned one where it was kept under.
        sgd_noise_scale: eta (N/B - 1) / (1 - m) of now, which both ways divide by the factor;
            known where dataset_size is.
    """

    model_config = ConfigDict(frozen=True)

    global_batch_size: Size
    learning_rate: float | None = _absent()
    factor: float
    limited_by_noise_scale: bool
    sgd_noise_scale: float | None = _absent()


class _Change(BaseModel):
    """What a change of batch and LR comes to; fields that do not apply are left out of the JSON."""

    model_config = ConfigDict(frozen=True)

    global_batch_size: Size
    learning_rate: float | None
    learning_rate_now: float | None = None
    layout: Layout | None = _absent()
    rules: dict[str, float] | None = _absent()
    chosen_rule: str | None = _absent()
    steps_multiplier: float | None = _absent()
    examples_multiplier: float | None = _absent()
    ramp_steps: int | None = _absent()

    def ramp(self, *, rule: str | None = None, steps: int | None = None) -> list[float]:
        """The learning rate of each step of the linear ramp; the last is the new one.

        Args:
            rule: Go to this rule's LR (a key of `rules`) and not to `learning_rate`.
            steps: Over so many steps and not `ramp_steps`.

        Raises:
            InvalidInputError: There is no LR to ramp, or no such rule.
        """
        if rule is not None and rule not in (self.rules or {}):
            raise InvalidInputError(
                f"rule {rule!r} is not one of {', '.join(self.rules or {}) or 'none'}", field="rule"
            )
        end = self.learning_rate if rule is None else (self.rules or {})[rule]
        if self.learning_rate_now is None or end is None:
            raise InvalidInputError(
                "there is no learning rate to ramp; give learning_rate and an optimizer with a rule",
                field="learning_rate",
            )
        return ramp(start=self.learning_rate_now, end=end, steps=steps or self.ramp_steps or 1)


class PlannedChange(_Change):
    """A batch that was asked for (target_global_batch_size), with the LR every rule gives it.

    Attributes:
        within_noise_scale: Whether the batch is at most the noise scale's lower end; beyond it
            a bigger batch stops paying.
    """

    within_noise_scale: bool


class Recommendation(_Change):
    """Advice with reasons. Fields that do not apply are left out of the JSON.

    Attributes:
        action: "raise" or "lower" the batch (and move the LR with it), "lr_only", or "hold".
        reason: Why, as one word a program can act on.
        global_batch_size, learning_rate: Advised; those of now on "hold". The LR is null where
            none is known, or where no rule is known for the optimizer.
        global_batch_size_now, learning_rate_now: What is advised on.
        layout: How to realise the batch.
        same_batch_option: The batch of now on target_dp_world_size ranks, at the LR of now.
        plan: The batch that was asked for.
        rules: The learning rate by every rule, at the advised batch.
        chosen_rule: The key of `rules` that learning_rate follows; absent where none does.
        rule_band: The LR audit's [low, high] for the batch of now.
        sample_efficiency_now: B_noise / (B_noise + B): the useful share of each example.
        sample_efficiency_now_at_least: The same when the noise scale is bounded only from below.
        sample_efficiency_then: At the advised batch.
        steps_multiplier, examples_multiplier: What the change does to steps and examples needed
            for the same progress.
        weight_decay_same_timescale: The weight decay that keeps AdamW's averaging timescale.
        adam_square_root_betas: beta1, beta2 and epsilon that go with the square-root rule.
        ramp_steps: Over how many steps to move the LR linearly.
        ramp_examples: The same in batch_units.
        steps_needed: Measured steps in all that would settle it, if the interval is too wide.
        confidence: "none" on a hold for want of evidence; else "low" or "medium".
        facts: The numbers users trip over: per-rank batch, ranks, accumulation, global batch.
        explanation: A few plain sentences, with the numbers.
        formula: Of the learning rate.
        sources: Where the formulas are from.
        assumed: What was not reported and was taken as a default.
    """

    action: Action
    reason: Reason
    global_batch_size_now: Size
    noise_scale: NoiseScaleInterval
    measured_steps: int
    batch_unit: BatchUnit = "examples"
    confidence: Confidence
    confidence_reasons: list[str] = []
    same_batch_option: SameBatchOption | None = _absent()
    plan: PlannedChange | None = _absent()
    rule_band: tuple[float, float] | None = _absent()
    sample_efficiency_now: float | None = _absent()
    sample_efficiency_now_at_least: float | None = _absent()
    sample_efficiency_then: float | None = _absent()
    weight_decay_same_timescale: float | None = _absent()
    adam_square_root_betas: dict[str, float] | None = _absent()
    batch_instead_of_decay: BatchInsteadOfDecay | None = _absent()
    ramp_examples: Size | None = _absent()
    steps_needed: int | None = _absent()
    facts: dict[str, int | float | str] = {}
    explanation: str
    formula: str
    sources: list[str]
    assumed: list[str] = []
