"""From the numbers of one measured step to its moments, on rank 0, after all the waiting is over."""

import logging
import math

from noisescale.blocks import TOTAL, MeasuredStep
from noisescale.errors import UnsupportedModelError
from noisescale.hooks.publish import Reading
from noisescale.moments import SampleGeometry, StepMoments, step_moments

_log = logging.getLogger(__name__)

IDENTICAL = 1e-5
"""Ranks whose gradients spread by less than this share of their size saw the same data: rounding
alone gives up to about 1e-6, and real noise that small would mean a noise scale of a hundred
thousandth of a rank's batch."""

OVERSHOOT = 1.001
"""A mean's square norm is never above the mean of the square norms, but for rounding."""


class StepReader:
    """Turns readings into measured steps; keeps what carries over from one to the next.

    Args:
        world_size: Data-parallel ranks.
        first_step: Number of the first step after attaching; more than 0 in a resumed job.
    """

    def __init__(self, *, world_size: int, first_step: int = 0) -> None:
        self.first_step = first_step
        self._world_size = world_size
        self._learning_rate: float | None = None
        self._examples = 0
        self._said_identical = False

    def read(self, reading: Reading) -> MeasuredStep | None:
        """One step; None where fewer than two ranks had a sample (the end of an uneven epoch).

        Raises:
            UnsupportedModelError: The reduced gradient cannot be a mean over the ranks.
        """
        if reading.learning_rate is not None and math.isfinite(reading.learning_rate):
            self._learning_rate = reading.learning_rate
        self._examples += reading.packet.examples
        if reading.packet.active < 2:
            return None
        examples, self._examples = self._examples, 0
        return MeasuredStep(
            step=self.first_step + reading.step,
            examples=examples,
            global_batch_size=float(reading.packet.count),
            learning_rate=self._learning_rate,
            moments=self._moments(reading),
        )

    def _moments(self, reading: Reading) -> dict[tuple[str, str], StepMoments] | None:
        packet = reading.packet
        geometry = SampleGeometry.equal_weights(
            samples=packet.active, sum_inverse_counts=packet.inverse_counts
        )
        # Where ranks ran out of data, the sum over the others was divided by more than their number.
        rescale = (reading.divisor / packet.active) ** 2
        # The first layer group is the whole model.
        local_sq = packet.local_squares[0] / packet.active
        global_sq = reading.global_squares[0] * rescale
        if not (packet.finite and math.isfinite(global_sq)):
            return None
        if global_sq > OVERSHOOT * local_sq:
            raise UnsupportedModelError(
                f"the reduced gradient's square norm {global_sq:.6g} is above the ranks' mean "
                f"{local_sq:.6g}, "
                "which no average over ranks can be; inner_hook= must average over all ranks of the model"
            )
        if local_sq > 0 and local_sq - global_sq <= IDENTICAL * local_sq:
            self._say_identical()
            return None
        moments = step_moments(local_sq=local_sq, global_sq=global_sq, geometry=geometry)
        return {(TOTAL, "euclidean"): moments}

    def _say_identical(self) -> None:
        if not self._said_identical:
            self._said_identical = True
            _log.warning(
                "noisescale sees the same gradient on all %d ranks: do they all read the same data? Use a "
                "DistributedSampler and call its set_epoch(epoch). Such steps are skipped, for they do not "
                "show a noise scale of 0 (said once)",
                self._world_size,
            )
