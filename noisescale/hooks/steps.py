"""From the numbers of one measured step to its moments, on rank 0, after all the waiting is over."""

import logging
import math
from collections.abc import Sequence

from noisescale.blocks import TOTAL, Geometry, MeasuredStep
from noisescale.errors import UnsupportedModelError
from noisescale.hooks.publish import Reading
from noisescale.hooks.sampling import Sampling
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
        sampling: What the samples are.
        groups: Names of the layer groups, in the order of a reading's square norms.
        geometries: Those that are measured beside the Euclidean one, in the order of NAMES.
        sharded: Whether the averaged gradient's square norms are in the packet.
        first_step: Number of the first step after attaching; more than 0 in a resumed job.
    """

    def __init__(
        self,
        *,
        world_size: int,
        sampling: Sampling,
        groups: Sequence[str] = (TOTAL,),
        geometries: Sequence[Geometry] = (),
        sharded: bool = False,
        first_step: int = 0,
    ) -> None:
        self.first_step = first_step
        self._world_size = world_size
        self._sampling = sampling
        self._groups = tuple(groups)
        self._geometries = tuple(geometries)
        self._sharded = sharded
        self._learning_rate: float | None = None
        self._examples = 0
        self._said_identical = False

    def read(self, reading: Reading) -> MeasuredStep | None:
        """One step; None where there were fewer than two samples (the end of an uneven epoch).

        Raises:
            UnsupportedModelError: The reduced gradient cannot be a mean over the ranks.
        """
        if reading.learning_rate is not None and math.isfinite(reading.learning_rate):
            self._learning_rate = reading.learning_rate
        self._examples += reading.packet.examples
        if reading.packet.samples < 2:
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
        packet, sampling, divisor = reading.packet, self._sampling, reading.divisor
        # Of a sharded model they were summed over ranks, behind the local ones.
        squares = packet.local_squares[-len(self._groups) :] if self._sharded else reading.global_squares
        pairs = [
            (
                sampling.local_sq(packet, group=index, divisor=divisor),
                sampling.global_sq(squares[index], packet, divisor=divisor),
            )
            for index in range(len(self._groups))
        ]
        if not (packet.finite and all(math.isfinite(global_sq) for _, global_sq in pairs)):
            return None
        local_sq, global_sq = pairs[self._groups.index(TOTAL)]
        if global_sq > OVERSHOOT * local_sq:
            raise UnsupportedModelError(
                f"the reduced gradient's square norm {global_sq:.6g} is above the samples' mean "
                f"{local_sq:.6g}, which no average of them can be; {self._likely_cause()}"
            )
        if local_sq > 0 and local_sq - global_sq <= IDENTICAL * local_sq:
            self._say_identical()
            return None
        geometry = sampling.geometry(packet)
        euclidean = {
            (group, sampling.geometry_name): step_moments(local_sq=local, global_sq=whole, geometry=geometry)
            for group, (local, whole) in zip(self._groups, pairs, strict=True)
        }
        return euclidean | self._other_geometries(reading, geometry)

    def _other_geometries(
        self, reading: Reading, geometry: SampleGeometry
    ) -> dict[tuple[str, str], StepMoments]:
        """Of the whole model; none where they were not sampled, or not all ranks had a sample."""
        packet, divisor = reading.packet, reading.divisor
        if not reading.geometry_numbers or packet.active != self._world_size:
            return {}
        found: dict[tuple[str, str], StepMoments] = {}
        for index, name in enumerate(self._geometries):
            first, second = reading.geometry_numbers[2 * index : 2 * index + 2]
            if not (math.isfinite(first) and math.isfinite(second)):
                continue
            if name == "adam":
                local_sq = self._sampling.local_sq(packet, group=len(self._groups), divisor=divisor)
                global_sq = self._sampling.global_sq(first, packet, divisor=divisor)
                found[TOTAL, name] = step_moments(local_sq=local_sq, global_sq=global_sq, geometry=geometry)
            else:
                found[TOTAL, name] = StepMoments(trace_covariance=first, true_grad_sq_norm=second)
        return found

    def _likely_cause(self) -> str:
        if self._sampling.loss_reduction == "global_mean":
            return (
                'with loss_reduction="global_mean" every loss must be a sum over its examples (or tokens), '
                "divided by the number of them in the whole step, and counted alike by count="
            )
        return "inner_hook= must average over all ranks of the model"

    def _say_identical(self) -> None:
        if not self._said_identical:
            self._said_identical = True
            _log.warning(
                "noisescale sees the same gradient in all samples of %d rank(s): are they all of the same "
                "data? Use a DistributedSampler and call its set_epoch(epoch). Such steps are skipped, for "
                "they do not show a noise scale of 0 (said once)",
                self._world_size,
            )
