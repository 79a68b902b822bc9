"""The nuclear-norm noise scale, of Muon and spectral descent, on matrices.

B_spectral = ||C^{1/2}||_S1^2 / ||G||_S1^2 (arXiv 2602.03001), with C = E[(g - G)(g - G)'] the covariance of
the rows over examples and ||.||_S1 the nuclear norm, the sum of singular values: the dual of the largest
singular value, which spectral descent steps by. A matrix with more rows than columns is transposed first, as
Muon does: of the two covariances the smaller is the tighter bound on the noise, and the cheaper.

To all-reduce (sum) on a measured step: the signed sum of halves.add_signed, of gradient size; the products
of add_products, m x m in float64 for an m x n matrix; four numbers of halves.half_terms. What follows is
needed on one rank only. The trace of the root of a covariance from few samples is too small, so covariances
are pooled over measured steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noisescale.errors import UnsupportedModelError
from noisescale.hooks.geometry.halves import Halves, Norms, paired_moments, working_dtype
from noisescale.hooks.geometry.moments import DeviceMoments, no_scalar
from noisescale.hooks.geometry.nuclear import nuclear_norm, trace_sqrt

POOLED_STEPS = 32
"""Measured steps after which an older covariance counts for less and less."""


@dataclass(frozen=True, slots=True)
class SpectralNorms:
    """One step's norms, and the covariances behind its noise.

    Attributes:
        norms: Summed over the matrices; `noise` of this step's samples alone is too small.
        covariances: C of every matrix, per example; m x m, float64.
    """

    norms: Norms
    covariances: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class SpectralMemory:
    """What one measured step leaves to the next; of the same parameters, in the same order.

    Attributes:
        norms: Of the step.
        covariances: Averages over the measured steps so far; m x m, float64.
        steps: How many steps' noise the averages are as good as.
    """

    norms: Norms
    covariances: tuple[Tensor, ...]
    steps: int = 1


def as_matrix(gradient: Tensor) -> Tensor:
    """A parameter's gradient as Muon sees it, in float32 or float64: at most as many rows as columns.

    A convolution's is flattened to (out, in * height * width). The order of the columns does not matter,
    so a channels-last gradient may come in its storage's order, viewed as (out, -1).

    Raises:
        UnsupportedModelError: It has fewer than two dimensions.
    """
    if gradient.dim() < 2:
        raise UnsupportedModelError(
            f"a gradient of shape {tuple(gradient.shape)} is not a matrix; the spectral noise scale is of "
            "parameters with two dimensions or more, so leave out biases and norm weights"
        )
    matrix = gradient.flatten(1).to(working_dtype(gradient))
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def add_products(
    gradients: Sequence[Tensor], *, weight: float | Tensor, into: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """One sample's part in sum_k w_k g_k g_k', a matrix per parameter: to be summed over samples and ranks.

    Args:
        gradients: One sample's mean gradient, a tensor per parameter, of two dimensions or more.
        weight: w_k.
        into: Of this rank's earlier micro-batches of the step; added to in place and returned.

    Returns:
        Float64: squares in float32 would lose all singular values below a thousandth of the largest.
    """
    matrices = [as_matrix(g).double() for g in gradients]
    products = [(m @ m.mT) * weight for m in matrices]
    if into is None:
        return products
    for total, term in zip(into, products, strict=True):
        total.add_(term)
    return list(into)


def finish(
    means: Sequence[Tensor],
    signed: Sequence[Tensor],
    products: Sequence[Tensor],
    halves: Halves,
    *,
    spread: float | Tensor,
) -> SpectralNorms:
    """The nuclear norms of one step.

    Args:
        means: The averaged gradient, a tensor per parameter of two dimensions or more; frozen ones left out.
        signed, products: Of the same parameters, all-reduced.
        halves: Of the step's samples.
        spread: sum_k w_k (1 - w_k) / n_k, as of noisescale.moments.SampleGeometry.
    """
    device = halves.residual.device
    noise, plain, half = no_scalar(device), no_scalar(device), no_scalar(device)
    covariances = []
    for mean, difference, product in zip(means, signed, products, strict=True):
        whole = as_matrix(mean)
        a, b = halves.means(whole, as_matrix(difference))
        covariance = (product - whole.double() @ whole.double().mT) / spread
        covariances.append(covariance)
        noise = noise + trace_sqrt(covariance)
        plain = plain + nuclear_norm(whole)
        half = half + (nuclear_norm(a) + nuclear_norm(b)) / 2
    return SpectralNorms(
        norms=Norms(noise=noise, plain=plain, extrapolated=halves.extrapolated(whole=plain, half=half)),
        covariances=tuple(covariances),
    )


def first_memory(current: SpectralNorms) -> SpectralMemory:
    """After the first measured step, which has no moments yet."""
    return SpectralMemory(norms=current.norms, covariances=current.covariances)


def pooled_moments(memory: SpectralMemory, current: SpectralNorms) -> tuple[DeviceMoments, SpectralMemory]:
    """A step's moments, and the memory for the next.

    The signal is paired with the step before, as in halves.paired_moments. The noise is of the pooled
    covariances. What the pool of s steps still lacks falls as 1 / s, so it is s / (s - 1) times the pool's
    distance from one step's own, and is added.

    Args:
        memory: Of the measured steps before, since the start or the last step that was not finite.
        current: This step's norms; finite.
    """
    steps = min(memory.steps + 1, POOLED_STEPS)
    covariances = tuple(
        torch.lerp(old, new, 1 / steps)
        for old, new in zip(memory.covariances, current.covariances, strict=True)
    )
    pooled = no_scalar(current.norms.noise.device)
    for covariance in covariances:
        pooled = pooled + trace_sqrt(covariance)
    single = (memory.norms.noise + current.norms.noise) / 2
    noise = pooled + (pooled - single) / (steps - 1)
    signal = paired_moments(memory.norms, current.norms).true_grad_sq_norm
    return (
        DeviceMoments(trace_covariance=noise.square(), true_grad_sq_norm=signal),
        SpectralMemory(norms=current.norms, covariances=covariances, steps=steps),
    )
