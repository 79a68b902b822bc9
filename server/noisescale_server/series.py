"""A run's noise scale over its steps."""

from collections.abc import Sequence

from noisescale.blocks import Block, Geometry
from noisescale.estimate import estimate
from noisescale.history import regime_starts
from noisescale.wire import Series, SeriesPoint


def series_of(
    blocks: Sequence[Block],
    *,
    run: str,
    group: str,
    geometry: Geometry,
    from_step: int,
    max_points: int,
    window_steps: int,
) -> Series:
    """Estimates at up to `max_points` of the run's blocks, evenly chosen, the last one always.

    Args:
        blocks: The run's from its first on, in step order.
        from_step: Leave out points of blocks that end before this step.
        window_steps: Measured steps that each point looks back over, within its regime.
    """
    starts = regime_starts(blocks)
    shown = [index for index, block in enumerate(blocks) if block.last_step >= from_step]
    if len(shown) > max_points:
        stride = (len(shown) - 1) / (max_points - 1)
        shown = [shown[round(point * stride)] for point in range(max_points)]
    examples = 0
    points: list[SeriesPoint] = []
    wanted = set(shown)
    for index, block in enumerate(blocks):
        examples += block.examples
        if index not in wanted:
            continue
        found = estimate(
            blocks[max(starts[index], index + 1 - window_steps) : index + 1],
            group=group,
            geometry=geometry,
            window_steps=window_steps,
        )
        points.append(
            SeriesPoint(
                step=block.last_step,
                examples=examples,
                noise_scale=found.noise_scale,
                lower=found.lower,
                upper=found.upper,
                trace_covariance=found.trace_covariance,
                true_grad_sq_norm=found.true_grad_sq_norm,
                global_batch_size=block.global_batch_size,
                learning_rate=block.learning_rate,
            )
        )
    return Series(
        run=run,
        group=group,
        geometry=geometry,
        batch_unit=blocks[-1].batch_unit if blocks else "examples",
        points=points,
    )
