"""What is a sample, and how samples are weighed in the averaged gradient.

The gradient of the step is sum_k w_k g_k over K samples, g_k the mean gradient of sample k over its
n_k examples. A backward pass gives not g_k but h_k, its part in the rank's gradient, whose mean over
the R ranks is the step's. With a loss that is the mean over its micro-batch, divided by M, that is
h_k = g_k / M and w_k = 1 / (R M). With a loss that is a sum over tokens divided by the number of all
tokens of all ranks and micro-batches (times R, to undo DDP's averaging), h_k = R n_k g_k / N and
w_k = n_k / N. Any factor on top, common to all, scales tr(Sigma) and |G|^2 alike.
"""

from dataclasses import dataclass
from typing import Literal

from noisescale.blocks import Geometry
from noisescale.hooks.counting import Tally
from noisescale.hooks.reduction import Packet
from noisescale.moments import SampleGeometry

SampledBy = Literal["rank", "micro_batch", "norm_layers"]
LossReduction = Literal["mean", "global_mean"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a run's gradients are sampled.

    Attributes:
        by: "rank": all that a rank accumulates in a step is one sample; "micro_batch": each of its
            micro-batches is one; "norm_layers": each example is one, at some layers.
        loss_reduction: "mean": each loss is the mean over its micro-batch. "global_mean": each is the
            sum over its examples (or tokens), divided by their number in the whole step.
    """

    by: SampledBy = "rank"
    loss_reduction: LossReduction = "mean"

    def samples(self, tally: Tally) -> int:
        """K of one rank."""
        if self.by == "norm_layers":
            return tally.count
        return tally.micro_batches if self.by == "micro_batch" else int(tally.micro_batches > 0)

    def weight_over_count(self, tally: Tally) -> float:
        """sum_k w_k / n_k of one rank, its own weights summing to 1."""
        if self.by == "norm_layers":
            return float(tally.count > 0)
        return tally.mean_inverse if self.by == "micro_batch" else tally.inverse_count

    def squared_weight_over_count(self, tally: Tally) -> float:
        """sum_k w_k^2 / n_k of one rank, likewise; for single examples too, as w_k = 1 / (M n)."""
        return tally.inverse_count

    def micro_batch_factor(self, count: int) -> float:
        """What the square of one micro-batch's h_k is multiplied by as it is added to the rank's others."""
        return 1.0 / count if self.loss_reduction == "global_mean" and count > 0 else 1.0

    @property
    def geometry_name(self) -> Geometry:
        """What the noise scale is of."""
        return "norm_layers" if self.by == "norm_layers" else "euclidean"

    def raw_weight(self, count: int, *, micro_batches: int) -> float:
        """w_k of one micro-batch, up to a factor common to all samples of all ranks."""
        return float(count) if self.loss_reduction == "global_mean" else 1.0 / micro_batches

    def rank_factor(self, tally: Tally) -> float:
        """What a rank's sum of squares is multiplied by at the end."""
        if self.by == "norm_layers":
            return float(tally.micro_batches)
        if self.by == "micro_batch":
            return float(tally.micro_batches) if self.loss_reduction == "mean" else 1.0
        return self.micro_batch_factor(tally.count)

    def local_sq(self, packet: Packet, *, group: int, divisor: int) -> float:
        """A = sum_k w_k |g_k|^2 of one layer group, over all ranks that had samples.

        Args:
            divisor: What the sum of gradients over ranks was divided by.
        """
        summed = packet.local_squares[group]
        if self.loss_reduction == "global_mean":
            return summed * packet.count / divisor**2
        return summed / packet.active

    def global_sq(self, global_square: float, packet: Packet, *, divisor: int) -> float:
        """Q, from the square norm of the reduced gradient.

        Where ranks ran out of data, the sum over the others was divided by more than their number.
        """
        if self.loss_reduction == "global_mean":
            return global_square
        return global_square * (divisor / packet.active) ** 2

    def geometry(self, packet: Packet) -> SampleGeometry:
        """Of the samples of all ranks."""
        if self.loss_reduction == "global_mean":
            return SampleGeometry.count_weights(samples=packet.samples, total_count=packet.count)
        return SampleGeometry.of_sums(
            weight_over_count=packet.weight_over_count / packet.active,
            squared_weight_over_count=packet.squared_weight_over_count / packet.active**2,
        )
