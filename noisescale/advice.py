"""What is asked of a recommendation, and what it answers: the models of /recommend.

The field names are those of the JSON. Both serve a job with no server as well.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from noisescale.blocks import BatchUnit, Geometry
from noisescale.history import Phase
from noisescale.wire import OptimizerFamily, PositiveFloat, PositiveInt, TunedBase

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
]
Confidence = Literal["none", "low", "medium", "high"]


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

    value: Annotated[FiniteFloat, Field(gt=0)] | None = None
    lower: Annotated[FiniteFloat, Field(ge=0)]
    upper: Annotated[FiniteFloat, Field(gt=0)] | None = None
    upper_confirmed: bool = True
    geometry: Geometry = "euclidean"


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
    phase: Phase | None = None
    batch_norm: bool | None = None
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] | None = None
    tuned_global_batch_size: PositiveFloat | None = None
    tuned_learning_rate: PositiveFloat | None = None
    planned_decay_factor: Annotated[FiniteFloat, Field(gt=1)] | None = None


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
    """Smith et al. 2018: the planned decay as a batch increase at an unchanged LR."""

    model_config = ConfigDict(frozen=True)

    global_batch_size: float
    learning_rate: float | None
    factor: float
    limited_by_noise_scale: bool
    sgd_noise_scale: float | None = None


class Recommendation(BaseModel):
    """Advice with reasons. Fields that do not apply are left out of the JSON.

    Attributes:
        action: "raise" or "lower" the batch (and move the LR with it), "lr_only", or "hold".
        reason: Why, as one word a program can act on.
        global_batch_size, learning_rate: Advised; those of now on "hold".
        layout: How to realise the batch.
        rules: The learning rate by every rule, at the advised batch.
        chosen_rule: The key of `rules` that learning_rate follows; null where none does.
        rule_band: The LR audit's [low, high] for the batch of now.
        sample_efficiency_now: B_noise / (B_noise + B): the useful share of each example.
        sample_efficiency_now_at_least: The same when the noise scale is bounded only from below.
        steps_multiplier, examples_multiplier: What the change does to steps and examples needed
            for the same progress.
        ramp_steps: Over how many steps to move the LR linearly.
        ramp_examples: The same in batch_units.
        ramp: The learning rate of the first steps of the ramp.
        steps_needed: Clean steps in all that would settle it, if the interval is too wide.
        explanation: A few plain sentences, with the numbers.
        sources: Where the formulas are from.
        assumed: What was not reported and was taken as a default.
        facts: The numbers users trip over: per-rank batch, ranks, accumulation, global batch.
    """

    model_config = ConfigDict(frozen=True)

    action: Action
    reason: Reason
    global_batch_size: float
    learning_rate: float | None
    noise_scale: NoiseScaleInterval
    measured_steps: int
    batch_unit: BatchUnit = "examples"
    confidence: Confidence
    confidence_reasons: list[str] = []
    layout: Layout | None = None
    same_batch_option: SameBatchOption | None = None
    rules: dict[str, float] | None = None
    chosen_rule: str | None = None
    rule_band: tuple[float, float] | None = None
    sample_efficiency_now: float | None = None
    sample_efficiency_now_at_least: float | None = None
    sample_efficiency_then: float | None = None
    steps_multiplier: float | None = None
    examples_multiplier: float | None = None
    weight_decay_same_timescale: float | None = None
    adam_square_root_betas: dict[str, float] | None = None
    batch_instead_of_decay: BatchInsteadOfDecay | None = None
    ramp_steps: int | None = None
    ramp_examples: float | None = None
    ramp: list[float] | None = None
    steps_needed: int | None = None
    facts: dict[str, float | int | str | None] = {}
    explanation: str
    formula: str
    sources: list[str]
    assumed: list[str] = []
