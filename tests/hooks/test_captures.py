"""The number is the same number, whichever way it was taken."""

from statistics import NormalDist

import pytest

from tests.hooks.captures import CAPTURES, Problem, alone, measure
from tests.hooks.ranks import Ranks

WIDER = NormalDist().inv_cdf(0.9995) / NormalDist().inv_cdf(0.975)


@pytest.mark.parametrize("problem", ["synthetic", "digits"])
@pytest.mark.parametrize("name", CAPTURES)
def test_every_capture_finds_the_noise_scale(
    two_ranks: Ranks, four_ranks: Ranks, name: str, problem: Problem
) -> None:
    """Within its own interval on a real net, and within 3% of 400 where the truth is exact."""
    ranks = CAPTURES[name].ranks
    if ranks == 1:
        estimate, truth = alone(name, problem)
    else:
        estimate, truth = {2: two_ranks, 4: four_ranks}[ranks].run(measure, name=name, problem=problem)[0]
    assert estimate.noise_scale is not None
    if problem == "synthetic":
        assert estimate.noise_scale == pytest.approx(truth, rel=0.03)
    assert estimate.upper is not None
    # Of 32 intervals of 95%, one or two would miss by chance: they are widened to what holds 99.9%.
    below, above = estimate.noise_scale - estimate.lower, estimate.upper - estimate.noise_scale
    assert estimate.noise_scale - WIDER * below < truth < estimate.noise_scale + WIDER * above
    assert estimate.global_batch_size == 64
