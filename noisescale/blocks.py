"""Consecutive steps, summed: what is kept, sent and merged.

A block holds, for a run of consecutive optimizer steps, the sums of the per-step moments and
of their squares and product. Blocks add, in any order, without losing what the noise scale or
its interval needs; that is why they, and not ratios or averages, travel to the server.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    model_validator,
)

from noisescale.moments import StepMoments

BatchUnit = Literal["examples", "tokens"]
Geometry = Literal["euclidean", "adam", "sign", "spectral", "norm_layers"]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A non-negative integer that survives any JSON reader."""

Moment = Annotated[FiniteFloat, Field(ge=-1e70, le=1e70)]
"""Far beyond any gradient's, and near enough that no estimate's arithmetic overflows."""

MomentSquare = Annotated[FiniteFloat, Field(ge=0, le=1e140)]
Rate = Annotated[FiniteFloat, Field(ge=0, le=1e100)]

TOTAL = "total"
"""The group that holds every parameter; always present."""

SMOOTH_LEARNING_RATE_RATIO = 1.2
"""A learning rate that moves by more than this between neighbours has jumped, not drifted."""


def main_geometry(blocks: "Iterable[Block]") -> Geometry:
    """Which geometry's total stands for the run: the Euclidean, or a proxy that was measured instead."""
    found = {sums.geometry for block in blocks for sums in block.sums}
    return "norm_layers" if "norm_layers" in found and "euclidean" not in found else "euclidean"


class MomentSums(BaseModel):
    """Sums over measured steps of one layer group's moments, in one geometry.

    Attributes:
        trace_covariance: Sum of tr(Sigma) estimates.
        true_grad_sq_norm: Sum of |G|^2 estimates; may be negative.
        trace_covariance_sq, true_grad_sq_norm_sq: Sums of their squares.
        product: Sum of trace_covariance * true_grad_sq_norm.
        steps: Measured steps summed here, where that is fewer than the block's own (a geometry
            that is sampled); null means the block's measured_steps.
    """

    model_config = ConfigDict(frozen=True)

    group: Name = TOTAL
    geometry: Geometry = "euclidean"
    trace_covariance: Moment
    true_grad_sq_norm: Moment
    trace_covariance_sq: MomentSquare
    true_grad_sq_norm_sq: MomentSquare
    product: Annotated[FiniteFloat, Field(ge=-1e140, le=1e140)]
    steps: Annotated[int, Field(ge=1, le=2**53)] | None = None

    @property
    def key(self) -> tuple[str, Geometry]:
        return self.group, self.geometry


class Block(BaseModel):
    """Sums over consecutive optimizer steps of one attempt.

    Attributes:
        first_step, last_step: Optimizer steps covered, both included, counted from 0.
        measured_steps: Steps whose moments are in `sums`.
        skipped_steps: Steps that were to be measured and were not: a non-finite gradient.
        examples: Examples (or tokens) consumed over all covered steps and all ranks.
        learning_rate: Of the optimizer's first parameter group, at the last step.
        global_batch_size: Median over measured steps, in `batch_unit`s.
        uneven_steps: Whether the size kept varying from step to step (beyond a last partial batch).
        sums: One entry per layer group and geometry; the group "total" is the whole model.
    """

    model_config = ConfigDict(frozen=True)

    first_step: Count
    last_step: Count
    measured_steps: Count
    skipped_steps: Count = 0
    examples: Count
    learning_rate: Rate | None = None
    global_batch_size: Annotated[FiniteFloat, Field(ge=1e-6, le=2**53)]
    batch_unit: BatchUnit = "examples"
    uneven_steps: bool = False
    sums: Annotated[tuple[MomentSums, ...], Field(max_length=64 * 5)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.last_step < self.first_step:
            raise ValueError(
                f"steps run backwards: last_step {self.last_step} is before first_step {self.first_step}"
            )
        covered = self.last_step - self.first_step + 1
        if self.measured_steps + self.skipped_steps > covered:
            raise ValueError(
                f"measured_steps {self.measured_steps} and skipped_steps {self.skipped_steps} together "
                f"exceed the {covered} steps from first_step to last_step"
            )
        if self.measured_steps > 0 and not self.sums:
            raise ValueError(f"measured_steps is {self.measured_steps} but sums is empty")
        if len(self.sums) > 1 and len({sums.key for sums in self.sums}) != len(self.sums):
            raise ValueError("sums names the same group and geometry twice")
        for sums in self.sums:
            if sums.steps is not None and sums.steps > self.measured_steps:
                raise ValueError("a sums entry has more steps than the block's measured_steps")
        return self

    def sums_of(self, group: str = TOTAL, geometry: str = "euclidean") -> MomentSums | None:
        """This block's sums for one layer group and geometry, None where it has none."""
        return next((s for s in self.sums if s.group == group and s.geometry == geometry), None)


@dataclass(slots=True)
class RunningSums:
    """A MomentSums under construction."""

    steps: int = 0
    trace_covariance: float = 0.0
    true_grad_sq_norm: float = 0.0
    trace_covariance_sq: float = 0.0
    true_grad_sq_norm_sq: float = 0.0
    product: float = 0.0

    def add(self, moments: StepMoments) -> None:
        s, g = moments.trace_covariance, moments.true_grad_sq_norm
        self.steps += 1
        self.trace_covariance += s
        self.true_grad_sq_norm += g
        self.trace_covariance_sq += s * s
        self.true_grad_sq_norm_sq += g * g
        self.product += s * g

    def merge(self, sums: MomentSums, *, steps: int) -> None:
        self.steps += steps
        self.trace_covariance += sums.trace_covariance
        self.true_grad_sq_norm += sums.true_grad_sq_norm
        self.trace_covariance_sq += sums.trace_covariance_sq
        self.true_grad_sq_norm_sq += sums.true_grad_sq_norm_sq
        self.product += sums.product

    def freeze(self, key: tuple[str, str], *, block_steps: int) -> MomentSums:
        return MomentSums.model_validate(
            {
                "group": key[0],
                "geometry": key[1],
                "trace_covariance": self.trace_covariance,
                "true_grad_sq_norm": self.true_grad_sq_norm,
                "trace_covariance_sq": self.trace_covariance_sq,
                "true_grad_sq_norm_sq": self.true_grad_sq_norm_sq,
                "product": self.product,
                "steps": None if self.steps == block_steps else self.steps,
            }
        )


def merge_blocks(blocks: Iterable[Block]) -> Block:
    """One block that says what several did; the order given does not matter.

    Raises:
        ValueError: There are no blocks, or they are in different batch units.
    """
    ordered = sorted(blocks, key=lambda block: block.first_step)
    if not ordered:
        raise ValueError("no blocks were given to merge")
    if len({block.batch_unit for block in ordered}) > 1:
        raise ValueError("blocks in examples and blocks in tokens cannot be merged")
    running: dict[tuple[str, str], RunningSums] = {}
    for block in ordered:
        for sums in block.sums:
            steps = sums.steps if sums.steps is not None else block.measured_steps
            running.setdefault(sums.key, RunningSums()).merge(sums, steps=steps)
    measured = sum(block.measured_steps for block in ordered)
    weights = [block.measured_steps for block in ordered]
    sizes = [block.global_batch_size for block in ordered]
    last = ordered[-1]
    return Block(
        first_step=ordered[0].first_step,
        last_step=max(block.last_step for block in ordered),
        measured_steps=measured,
        skipped_steps=sum(block.skipped_steps for block in ordered),
        examples=sum(block.examples for block in ordered),
        learning_rate=last.learning_rate,
        global_batch_size=_weighted_median(sizes, weights),
        batch_unit=last.batch_unit,
        uneven_steps=any(block.uneven_steps for block in ordered),
        sums=tuple(s.freeze(key, block_steps=measured) for key, s in running.items() if s.steps),
    )


def _weighted_median(values: Sequence[float], weights: Sequence[int]) -> float:
    pairs = sorted(zip(values, weights, strict=True))
    half = sum(weights) / 2
    seen = 0.0
    for value, weight in pairs:
        seen += weight
        if seen >= half and weight > 0:
            return value
    return pairs[-1][0]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured optimizer step, as rank 0 learns of it.

    Attributes:
        step: Optimizer step, counted from 0.
        examples: Examples (or tokens) consumed by all ranks since the previous measured step,
            this one included.
        global_batch_size: Of this step.
        moments: Per (group, geometry); None for a step with a non-finite gradient, which counts
            as skipped.
    """

    step: int
    examples: int
    global_batch_size: float
    learning_rate: float | None
    moments: Mapping[tuple[str, str], StepMoments] | None


@dataclass(slots=True)
class BlockBuilder:
    """Collects measured steps into blocks, each of one batch size and one smooth stretch of LR.

    A block closes when it has `block_steps` measured steps, when it is older than
    `max_age_s`, when the learning rate jumps, or when the batch size changes for good. One odd
    step (the last partial batch of an epoch) does not close it: a new size counts once two
    measured steps in a row have it.
    """

    batch_unit: BatchUnit = "examples"
    block_steps: int = 10
    max_age_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    first_step: int = 0
    _steps: list[MeasuredStep] = field(default_factory=list)
    _opened_at: float | None = None
    _typical_size: float | None = None
    _odd: MeasuredStep | None = None

    def add(self, step: MeasuredStep) -> list[Block]:
        """Take one step in; the blocks that this closes, usually none or one."""
        closed: list[Block] = []
        odd, self._odd = self._odd, None
        if odd is not None:
            if odd.global_batch_size == step.global_batch_size:
                closed += self.close()
                self._typical_size = step.global_batch_size
            self._take(odd)
        elif self._is_odd(step):
            self._odd = step
            return closed
        if self._steps and learning_rate_jumped(self._steps[-1].learning_rate, step.learning_rate):
            closed += self.close()
        self._take(step)
        measured = sum(s.moments is not None for s in self._steps)
        if measured >= self.block_steps or self.age_s() >= self.max_age_s:
            closed += self.close()
        return closed

    def age_s(self) -> float:
        """Seconds since the first step of the open block; 0 when there is none."""
        return 0.0 if self._opened_at is None else self.clock() - self._opened_at

    def close(self, *, final: bool = False) -> list[Block]:
        """The open block, if it has steps; `final` takes in a step held back, so nothing is lost."""
        if final and self._odd is not None:
            odd, self._odd = self._odd, None
            self._take(odd)
        steps, self._steps, self._opened_at = self._steps, [], None
        if not steps:
            return []
        block = self._block(steps)
        self.first_step = block.last_step + 1
        return [block]

    def _is_odd(self, step: MeasuredStep) -> bool:
        return (
            self.batch_unit == "examples"
            and step.moments is not None
            and self._typical_size is not None
            and step.global_batch_size != self._typical_size
        )

    def _take(self, step: MeasuredStep) -> None:
        if self._opened_at is None:
            self._opened_at = self.clock()
        if self._typical_size is None and step.global_batch_size > 0:
            self._typical_size = step.global_batch_size
        self._steps.append(step)

    def _block(self, steps: list[MeasuredStep]) -> Block:
        running: dict[tuple[str, str], RunningSums] = {}
        for step in steps:
            for key, moments in (step.moments or {}).items():
                running.setdefault(key, RunningSums()).add(moments)
        measured = sum(step.moments is not None for step in steps)
        sizes = [step.global_batch_size for step in steps if step.global_batch_size > 0]
        typical = self._typical_size if self._typical_size is not None else 1.0
        uneven = sum(size != typical for size in sizes) > max(1, len(sizes) // 4)
        return Block(
            first_step=min(self.first_step, steps[0].step),
            last_step=steps[-1].step,
            measured_steps=measured,
            skipped_steps=len(steps) - measured,
            examples=sum(step.examples for step in steps),
            learning_rate=steps[-1].learning_rate,
            global_batch_size=statistics.median_low(sizes) if uneven else typical,
            batch_unit=self.batch_unit,
            uneven_steps=uneven,
            sums=tuple(s.freeze(key, block_steps=measured) for key, s in running.items()),
        )


def learning_rate_jumped(before: float | None, after: float | None) -> bool:
    """Whether the LR moved by more than 20% from one neighbour to the next, up or down."""
    if before is None or after is None or before == after:
        return False
    low, high = sorted((before, after))
    return high > low * SMOOTH_LEARNING_RATE_RATIO
