"""Whatever may be reported, and whatever may be asked, there is an answer, in finite numbers."""

import math
from typing import Any, get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noisescale.advice import RecommendRequest
from noisescale.blocks import Block
from noisescale.errors import NoiseScaleError
from noisescale.estimate import LARGEST, estimate
from noisescale.history import Phase
from noisescale.recommend import recommend, recommend_run
from noisescale.wire import OptimizerFamily, RunInfo

SIZES = st.floats(1e-100, 1e100) | st.sampled_from([1e-100, 1e100, 1.0, 64, 256, 2**53])
COUNTS = st.integers(1, 2**31 - 1) | st.integers(1, 64)
ENDS = st.floats(0, LARGEST) | st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1e4, LARGEST])
SHARES = st.floats(0, 1, exclude_max=True)
NOT_NEGATIVE = st.floats(0, allow_infinity=False)


@st.composite
def intervals(draw: st.DrawFn) -> dict[str, Any]:
    """A noise scale's interval, in order."""
    lower, value, upper = sorted(draw(st.tuples(ENDS, ENDS, ENDS)))
    found: dict[str, Any] = {"lower": lower, "upper_confirmed": draw(st.booleans())}
    if value > 0 and draw(st.booleans()):
        found["value"] = value
    if upper > 0 and draw(st.booleans()):
        found["upper"] = upper
    return found


REQUESTS = st.fixed_dictionaries(
    {"noise_scale": intervals(), "global_batch_size": SIZES, "measured_steps": st.integers(0, 2**53)},
    optional={
        "learning_rate": SIZES,
        "optimizer": st.sampled_from(get_args(OptimizerFamily)),
        "batch_unit": st.sampled_from(["examples", "tokens"]),
        "dp_world_size": COUNTS,
        "micro_batch_size": SIZES,
        "accumulation_steps": COUNTS,
        "max_micro_batch_size": COUNTS,
        "target_dp_world_size": COUNTS,
        "target_global_batch_size": SIZES,
        "phase": st.sampled_from(get_args(Phase)),
        "batch_norm": st.booleans(),
        "momentum": SHARES,
        "beta1": SHARES,
        "beta2": SHARES,
        "epsilon": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "tuned": st.fixed_dictionaries({"global_batch_size": SIZES, "learning_rate": SIZES}),
        "planned_decay": st.fixed_dictionaries(
            {"factor": st.floats(1, exclude_min=True, allow_infinity=False)}, optional={"dataset_size": SIZES}
        ),
    },
)


def numbers(node: Any) -> list[float]:
    """Every number in an answer."""
    if isinstance(node, dict):
        return [found for value in node.values() for found in numbers(value)]
    if isinstance(node, list | tuple):
        return [found for value in node for found in numbers(value)]
    return [node] if isinstance(node, int | float) else []


MOMENTS = st.floats(-1e70, 1e70) | st.floats(-10, 10) | st.sampled_from([0.0, 5e-324, 1e-160, 1e70, -1e70])
SQUARES = st.floats(0, 1e140) | st.floats(0, 10) | st.sampled_from([0.0, 5e-324, 1e140])
SUMS = st.fixed_dictionaries(
    {
        "trace_covariance": MOMENTS,
        "true_grad_sq_norm": MOMENTS,
        "trace_covariance_sq": SQUARES,
        "true_grad_sq_norm_sq": SQUARES,
        "product": st.floats(-1e140, 1e140) | st.floats(-10, 10),
    }
)
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {
            "sums": SUMS.map(lambda sums: [sums]),
            "examples": st.integers(0, 2**53),
            "global_batch_size": st.floats(1e-6, 2**53) | st.just(64.0),
        },
        optional={"learning_rate": st.floats(0, 1e100) | st.sampled_from([0.0, 1e-100, 0.1, 1e100])},
    ),
    min_size=1,
    max_size=24,
)
ANY = settings(
    max_examples=400, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@ANY
@given(REQUESTS)
def test_every_request_is_answered_or_refused(given_numbers: dict[str, Any]) -> None:
    """Advice, or an error of ours: no overflow, no division by zero, nothing infinite."""
    request = RecommendRequest.model_validate(given_numbers)
    try:
        answer = recommend(request)
    except NoiseScaleError:
        return
    assert all(math.isfinite(number) for number in numbers(answer.model_dump()))


@ANY
@given(BLOCKS, st.integers(1, 40), st.sampled_from(get_args(OptimizerFamily)))
def test_every_report_that_is_taken_can_be_evaluated(
    reported: list[dict[str, Any]], steps: int, optimizer: OptimizerFamily
) -> None:
    """Sums that no job has, too: an estimate in finite numbers, and advice or an error of ours."""
    blocks = [
        Block.model_validate(
            block
            | {"first_step": index * steps, "last_step": (index + 1) * steps - 1, "measured_steps": steps}
        )
        for index, block in enumerate(reported)
    ]
    found = estimate(blocks)
    assert all(math.isfinite(number) for number in numbers(found.model_dump()))
    try:
        answer = recommend_run(blocks, RunInfo(optimizer=optimizer, dp_world_size=4))
    except NoiseScaleError:
        return
    assert all(math.isfinite(number) for number in numbers(answer.model_dump()))
