"""The wire: what a job sends to a server and what the server answers.

`POST /v1/runs/{run}/blocks` takes a BlocksReport and answers BlocksAccepted after the commit.
A block's key is (run, attempt, first_step): sent twice, it is stored once. A later attempt
supersedes the steps it repeats. Unknown fields pass; a newer schema_version is refused.
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from noisescale.blocks import BatchUnit, Block, Count, Name
from noisescale.errors import SchemaVersionError
from noisescale.estimate import LARGEST, Estimate

SCHEMA_VERSION = 1
MAX_BLOCKS_PER_REPORT = 1000

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
SMALLEST = 1e-100


def _calculable(value: float) -> float:
    # By hand, since pydantic's own message writes out a hundred digits.
    if not SMALLEST <= value <= LARGEST:
        raise PydanticCustomError("out_of_range", f"Input should be from {SMALLEST:g} to {LARGEST:g}")
    return value


PositiveFloat = Annotated[
    FiniteFloat,
    Field(gt=0, json_schema_extra={"minimum": SMALLEST, "maximum": LARGEST}),
    AfterValidator(_calculable),
]
"""A batch size or learning rate; so bounded that neither ratios nor products of two overflow."""

LabelValue = Annotated[str, StringConstraints(max_length=256)]
OptimizerFamily = Literal["sgd", "adam", "adamw", "lamb", "lars", "sign", "lion", "muon", "other"]


RunState = Literal["running", "stale", "ended"]


class TunedBase(BaseModel):
    """A learning rate that was tuned, and the global batch it was tuned at."""

    model_config = ConfigDict(frozen=True)

    global_batch_size: PositiveFloat
    learning_rate: PositiveFloat


class RunInfo(BaseModel):
    """What is known of a run besides its gradients. Every field may be missing.

    Attributes:
        optimizer: Family; decides which learning-rate rule applies.
        optimizer_name: The optimizer's class, as the job sees it.
        dp_world_size: Data-parallel ranks.
        micro_batch_size: One forward and backward on one rank, in batch_units.
        accumulation_steps: Micro-batches per optimizer step and rank.
        max_micro_batch_size: The largest that fits in memory.
        batch_norm: Whether the model has BatchNorm layers that keep their statistics per rank.
        every: Every how many steps one is measured now.
        measured_share: Share of step time that measuring costs, as measured; null where unknown.
        loss_reduction: "mean" over each rank's own batch, or "global_mean".
        tuned: The base the LR audit compares with.
        labels: Free key-value pairs, shown and never used in arithmetic.
        versions: Of noisescale, torch and python.
    """

    model_config = ConfigDict(frozen=True)

    optimizer: OptimizerFamily | None = None
    optimizer_name: Annotated[str, StringConstraints(max_length=128)] | None = None
    dp_world_size: PositiveInt | None = None
    micro_batch_size: PositiveFloat | None = None
    accumulation_steps: PositiveInt | None = None
    max_micro_batch_size: PositiveInt | None = None
    batch_norm: bool | None = None
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    beta1: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    beta2: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    epsilon: Annotated[FiniteFloat, Field(ge=0)] | None = None
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] | None = None
    every: PositiveInt | None = None
    measured_share: Annotated[FiniteFloat, Field(ge=0)] | None = None
    loss_reduction: Literal["mean", "global_mean"] | None = None
    samples: Literal["rank", "micro_batch", "norm_layers"] | None = None
    tuned: TunedBase | None = None
    labels: Annotated[dict[Name, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    versions: Annotated[dict[Name, LabelValue], Field(max_length=16)] = Field(default_factory=dict)


class BlocksReport(BaseModel):
    """One request of a job to `POST /v1/runs/{run}/blocks`.

    Attributes:
        schema_version: Of this message; see check_schema_version.
        attempt: One start of the job; a later start has a larger number (milliseconds since
            1970 by default).
        seq: Counts the reports of an attempt, from 0.
        run: What is known of the run now; replaces what was known.
        blocks: In step order; may be empty, as in a heartbeat or a farewell.
        dropped_blocks: Blocks of this attempt lost so far before they could be sent.
        ended: Whether the job says it is done.
    """

    model_config = ConfigDict(frozen=True)

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    attempt: Count
    seq: Count = 0
    run: RunInfo = Field(default_factory=RunInfo)
    blocks: Annotated[tuple[Block, ...], Field(max_length=MAX_BLOCKS_PER_REPORT)] = ()
    dropped_blocks: Count = 0
    ended: bool = False

    @model_validator(mode="after")
    def _in_step_order(self) -> Self:
        for before, after in pairwise(self.blocks):
            if after.first_step <= before.last_step:
                raise ValueError(
                    f"blocks run backwards: one that starts at step {after.first_step} follows one that "
                    f"ends at step {before.last_step}; send them in step order, each step once"
                )
        return self


class BlocksAccepted(BaseModel):
    """The answer, after the commit.

    Attributes:
        accepted: Blocks stored by this request.
        duplicates: Blocks that were stored already, and were left as they are.
        last_step: The last optimizer step known of this run; null before its first block.
    """

    model_config = ConfigDict(frozen=True)

    accepted: Count
    duplicates: Count
    last_step: Count | None


class RunSummary(BaseModel):
    """One run, as `GET /v1/runs` lists it.

    Attributes:
        state: "running", "stale" (no report for the grace time) or "ended".
        noise_scale, lower, upper: Of the current regime; see noisescale.estimate.
        action, reason: What /recommend advises now.
        last_report_at: Unix time, in seconds, of the last report.
    """

    model_config = ConfigDict(frozen=True)

    run: Name
    state: RunState
    batch_unit: BatchUnit = "examples"
    noise_scale: float | None = None
    lower: float | None = None
    upper: float | None = None
    global_batch_size: float | None = None
    learning_rate: float | None = None
    action: str | None = None
    reason: str | None = None
    last_step: int | None = None
    measured_steps: int = 0
    last_report_at: float


class RunList(BaseModel):
    """The answer of `GET /v1/runs`, newest report first."""

    runs: list[RunSummary]


class RunDetail(RunSummary):
    """The answer of `GET /v1/runs/{run}`.

    Attributes:
        info: What the job reported of itself.
        attempts: Start numbers of the job's attempts, oldest first.
        phase: What the learning rate is doing.
        estimates: One per layer group and geometry, of the current regime.
        steps, examples, skipped_steps: Of the whole run.
        dropped_blocks: Blocks the job lost before it could send them.
    """

    info: RunInfo
    attempts: list[int]
    phase: str
    estimates: list[Estimate]
    steps: int
    examples: int
    skipped_steps: int
    dropped_blocks: int


class SeriesPoint(BaseModel):
    """The noise scale as it stood at one step, over the window that ends there."""

    step: int
    examples: int
    noise_scale: float | None
    lower: float
    upper: float | None
    trace_covariance: float | None
    true_grad_sq_norm: float | None
    global_batch_size: float | None
    learning_rate: float | None


class Series(BaseModel):
    """The answer of `GET /v1/runs/{run}/series`, in step order."""

    run: Name
    group: str
    geometry: str
    batch_unit: BatchUnit
    points: list[SeriesPoint]


class ErrorDetail(BaseModel):
    """What went wrong. `fields` names the offending fields, `nearest` the nearest known runs."""

    code: str
    message: str
    fields: list[str] = []
    nearest: list[str] = []


class ErrorBody(BaseModel):
    """The body of every 4xx and 5xx answer."""

    error: ErrorDetail


def check_schema_version(given: int) -> None:
    """Refuse what is newer than this version.

    Raises:
        SchemaVersionError: `given` is greater than SCHEMA_VERSION.
    """
    if given > SCHEMA_VERSION:
        raise SchemaVersionError(given=given, supported=SCHEMA_VERSION)
