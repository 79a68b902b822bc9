"""Reports as a job sends them, from noise of known noise scale."""

import json
from collections.abc import Sequence
from typing import Any

from noisescale.blocks import Block
from tests.synthetic import blocks_of, gaussian_moments

ATTEMPT = 1_764_547_200_000


def some_blocks(steps: int = 200, *, seed: int = 0, first_step: int = 0, **options: Any) -> list[Block]:
    """Blocks of 10 steps each, of a run whose noise scale is 400."""
    moments = gaussian_moments(steps=steps, counts=(16,) * 4, seed=seed)
    return blocks_of(moments, first_step=first_step, **options)


def report(
    blocks: Sequence[Block] = (), *, attempt: int = ATTEMPT, seq: int = 0, **fields: Any
) -> dict[str, Any]:
    """One report's JSON."""
    run = {"optimizer": "sgd", "dp_world_size": 4, "micro_batch_size": 16, "accumulation_steps": 1}
    return {
        "schema_version": 1,
        "attempt": attempt,
        "seq": seq,
        "run": run | fields.pop("run", {}),
        "blocks": [json.loads(block.model_dump_json(exclude_none=True)) for block in blocks],
        **fields,
    }


def sums_of(blocks: Sequence[Block]) -> tuple[float, float, int]:
    """tr(Sigma), |G|^2 and measured steps, summed."""
    return (
        sum(block.sums[0].trace_covariance for block in blocks),
        sum(block.sums[0].true_grad_sq_norm for block in blocks),
        sum(block.measured_steps for block in blocks),
    )
