"""A step's samples in two halves, and what two halves tell about a norm.

The norms of sign and spectral descent are not quadratic, so no combination of per-sample squares
estimates them without bias. What does help is the gradient of half the samples: its noise is sqrt(2)
times as large, so how much a norm grows from the whole to a half shows how much of it is noise; and
the difference of the two halves has no signal in it at all.

Samples alternate between the halves a and b. Let W_a, W_b be the sums of their weights. From the
averaged gradient gbar, which every rank has, and one all-reduced buffer, the signed sum
h = sum_a w_k g_k - sum_b w_k g_k, both halves follow: g_a = (gbar + h) / (2 W_a), g_b = (gbar - h) / (2 W_b).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from noisescale.hooks.geometry.moments import DeviceMoments

HALF_NORMAL_MEAN = math.sqrt(2 / math.pi)
"""E|z| of a standard normal z."""


def half_sign(*, rank: int, micro_batch: int = 0, micro_batches: int = 1) -> int:
    """Which half a sample belongs to: 1 for a, -1 for b.

    Alternates over all samples of the step in the order of (rank, micro-batch), so that the halves
    differ by at most one sample, and each has one as soon as there are two.

    Args:
        rank: Within the data-parallel group.
        micro_batch: Of this rank and step, counted from 0.
        micro_batches: M, per rank and step.
    """
    return 1 if (rank * micro_batches + micro_batch) % 2 == 0 else -1


def half_terms(*, half: int, weight: float | Tensor, count: float | Tensor, device: torch.device) -> Tensor:
    """One sample's part in the sizes of the halves: to be summed over samples and ranks.

    Args:
        half: Of half_sign.
        weight: w_k, the sample's weight in the averaged gradient.
        count: n_k, examples (or tokens) behind it. A sample of no examples has no part: leave it out, or
            give it weight 0 and count 1.
        device: Where the terms go.

    Returns:
        Float64, shape [4]: the weight and w_k^2 / n_k, in the places of the sample's half.
    """
    w = torch.as_tensor(weight, dtype=torch.float64).to(device, non_blocking=True)
    n = torch.as_tensor(count, dtype=torch.float64).to(device, non_blocking=True)
    mine = torch.stack((w, w * w / n))
    none = torch.zeros_like(mine)
    return torch.cat((mine, none) if half > 0 else (none, mine))


@dataclass(frozen=True, slots=True)
class Halves:
    """The sizes of a step's two halves, 0-d float64 tensors.

    A noise of per-example covariance Sigma has covariance residual * Sigma in a mean. Where a half has
    no sample, what is computed from it is not finite.

    Attributes:
        weight_a, weight_b: W, the sum of the half's weights.
        residual: Of the averaged gradient: sum_k w_k^2 / n_k, 1/N for equal sizes.
        residual_a, residual_b: Of the half's mean.
    """

    weight_a: Tensor
    weight_b: Tensor
    residual: Tensor
    residual_a: Tensor
    residual_b: Tensor

    @classmethod
    def of(cls, terms: Tensor) -> Self:
        """From the sum over samples of half_terms."""
        weight_a, square_a, weight_b, square_b = terms.unbind()
        return cls(
            weight_a=weight_a,
            weight_b=weight_b,
            residual=square_a + square_b,
            residual_a=square_a / weight_a**2,
            residual_b=square_b / weight_b**2,
        )

    def means(self, mean: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
        """The mean gradients of the halves, from the averaged gradient and the signed sum."""
        return (mean + signed) / (2 * self.weight_a), (mean - signed) / (2 * self.weight_b)

    def extrapolated(self, *, whole: Tensor, half: Tensor) -> Tensor:
        """A norm as it would be without noise, taking noise to add its standard deviation times a constant.

        Richardson extrapolation of order 1/2 in the number of examples. Exact where there is no signal,
        by scaling, and where there is no noise. In between it is too small: a coordinate well below its
        noise does not lengthen the whole by much more than the half.

        Args:
            whole: The averaged gradient's norm.
            half: The mean of the two halves' norms.
        """
        noise = self.residual.sqrt()
        half_noise = (self.residual_a.sqrt() + self.residual_b.sqrt()) / 2
        return (half_noise * whole - noise * half) / (half_noise - noise)

    @property
    def difference_residual(self) -> Tensor:
        """Of the difference of the halves' means."""
        return self.residual_a + self.residual_b


@dataclass(frozen=True, slots=True)
class Norms:
    """One step's norms, 0-d float64 tensors; each is linear in the gradient's scale.

    The norms of several parameters, or of several groups of them, add.

    Attributes:
        noise: Of the per-example noise, as the geometry defines it.
        plain: Of the averaged gradient: in expectation too large for the true gradient's norm.
        extrapolated: Of Halves.extrapolated: in expectation too small for it; may be negative.
    """

    noise: Tensor
    plain: Tensor
    extrapolated: Tensor

    def __add__(self, other: "Norms") -> "Norms":
        return Norms(
            noise=self.noise + other.noise,
            plain=self.plain + other.plain,
            extrapolated=self.extrapolated + other.extrapolated,
        )


def paired_moments(previous: Norms, current: Norms) -> DeviceMoments:
    """Moments from the norms of two measured steps in a row.

    The square of a noisy norm is too large by the norm's own variance, which does not go away by averaging
    over steps. The product of two steps' norms is not, since their noises are independent.

    The signal is the product of the norm that is too large with the one that is too small. For Gaussian
    noise the noise scale from it is never more than 1.84 times too large, whatever the gradient, the noise
    and the batch (docs/geometries.md).
    """
    return DeviceMoments(
        trace_covariance=previous.noise * current.noise,
        true_grad_sq_norm=(previous.plain * current.extrapolated + current.plain * previous.extrapolated) / 2,
    )


def add_signed(
    gradients: Sequence[Tensor],
    *,
    half: int,
    weight: float | Tensor,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """One sample's part in the signed sum h: to be summed over samples and ranks.

    Args:
        gradients: One sample's mean gradient, a tensor per parameter.
        half: Of half_sign.
        weight: w_k.
        into: Of this rank's earlier micro-batches of the step; added to in place and returned.

    Returns:
        Float32 (float64 for float64 gradients), of the gradients' shapes.
    """
    scaled = [(g.to(working_dtype(g)) * weight) * half for g in gradients]
    if into is None:
        return scaled
    for total, term in zip(into, scaled, strict=True):
        total.add_(term)
    return list(into)


def working_dtype(gradient: Tensor) -> torch.dtype:
    """Float32 at least: squares and sums of fp16 and bf16 overflow or round away."""
    return torch.promote_types(gradient.dtype, torch.float32)
