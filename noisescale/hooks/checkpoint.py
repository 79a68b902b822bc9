"""A monitor's state in a checkpoint: plain numbers, strings, lists and dicts.

`torch.load(weights_only=True)` takes it, and floats come back bit for bit. Nothing in it depends
on the number of ranks: what was measured with 8 of them goes on with 4.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from noisescale.blocks import Block, BlockBuilder, MeasuredStep
from noisescale.errors import StateError
from noisescale.moments import StepMoments

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class RestoredRun:
    """What a state says.

    Attributes:
        next_step: Number of the first optimizer step to come.
        every: Every how many steps one was measured.
        attempt: That saved it; 0 where the state does not say.
    """

    blocks: list[Block]
    builder: BlockBuilder
    next_step: int
    every: int
    attempt: int = 0


def run_state(
    *, builder: BlockBuilder, blocks: Iterable[Block], next_step: int, every: int, attempt: int
) -> dict[str, Any]:
    """All that a monitor needs to go on as if it had never stopped, the open block included."""
    held = [*builder._steps, *([builder._odd] if builder._odd is not None else [])]
    return {
        "version": STATE_VERSION,
        "batch_unit": builder.batch_unit,
        "next_step": next_step,
        "every": every,
        "attempt": attempt,
        "blocks": [block.model_dump(mode="json") for block in blocks],
        "open_block": {
            "first_step": builder.first_step,
            "typical_size": builder._typical_size,
            "holds_back_last": builder._odd is not None,
            "age_s": builder.age_s(),
            "steps": [_step_state(step) for step in held],
        },
    }


def restored_run(state: Mapping[str, Any], *, like: BlockBuilder) -> RestoredRun:
    """The reverse of run_state.

    Args:
        like: A builder with the settings that the restored one is to have.

    Raises:
        StateError: It is of another version or another batch unit, or no such state.
    """
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"this monitor state has version {state.get('version')!r}, and this noisescale reads "
            f"{STATE_VERSION}; leave it out, and the run starts measuring afresh"
        )
    if state.get("batch_unit") != like.batch_unit:
        raise StateError(
            f"this monitor state counts {state.get('batch_unit')!r}, and the monitor was attached with "
            f"batch_unit={like.batch_unit!r}; attach with the same unit, or leave the state out"
        )
    try:
        return RestoredRun(
            blocks=[Block.model_validate(block) for block in state["blocks"]],
            builder=_builder_from(state["open_block"], like=like),
            next_step=int(state["next_step"]),
            every=int(state["every"]),
            attempt=int(state.get("attempt", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no state of a noisescale monitor: {error!r}") from error


def _step_state(step: MeasuredStep) -> dict[str, Any]:
    moments = None
    if step.moments is not None:
        moments = [[*key, m.trace_covariance, m.true_grad_sq_norm] for key, m in step.moments.items()]
    return {**asdict(step), "moments": moments}


def _step_from(state: Mapping[str, Any]) -> MeasuredStep:
    moments = None
    if state["moments"] is not None:
        moments = {
            (group, geometry): StepMoments(trace_covariance=trace, true_grad_sq_norm=signal)
            for group, geometry, trace, signal in state["moments"]
        }
    return MeasuredStep(**{**state, "moments": moments})


def _builder_from(state: Mapping[str, Any], *, like: BlockBuilder) -> BlockBuilder:
    steps = [_step_from(step) for step in state["steps"]]
    odd = steps.pop() if state["holds_back_last"] else None
    return BlockBuilder(
        batch_unit=like.batch_unit,
        block_steps=like.block_steps,
        max_age_s=like.max_age_s,
        clock=like.clock,
        first_step=int(state["first_step"]),
        _steps=steps,
        _opened_at=like.clock() - float(state["age_s"]) if steps else None,
        _typical_size=state["typical_size"],
        _odd=odd,
    )
