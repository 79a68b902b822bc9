"""Nuclear norms by matrix products alone.

torch.linalg's decompositions read back whether they converged, which makes the host wait for the device, and
are slow on GPUs. The nuclear norm of A is also <A, U> with U its polar factor, all singular values set to 1,
and an odd polynomial of A in a few products takes them there (the Newton-Schulz iteration, as Muon uses it).
"""

import torch
from torch import Tensor

RAISING = (3.4445, -4.7750, 2.0315)
"""Muon's quintic: multiplies small singular values by 3.4 and leaves those near 1 between .68 and 1.2."""

SETTLING = (1.875, -1.25, 0.375)
"""The quintic whose error falls with its cube, to 1 exactly."""

RAISINGS, SETTLINGS = 10, 5
"""A singular value of 1e-5 of the matrix's Frobenius norm still counts in full."""


def nuclear_norm(matrix: Tensor) -> Tensor:
    """The sum of singular values, a 0-d float64 tensor; relative error below 1e-4 in float32.

    Args:
        matrix: Float32 or float64, at most as many rows as columns.
    """
    length = torch.linalg.vector_norm(matrix)
    # Of a zero matrix: 0, not NaN. Not-finite ones stay so.
    factor = matrix / torch.where(length == 0, 1.0, length)
    for a, b, c in (RAISING,) * RAISINGS + (SETTLING,) * SETTLINGS:
        gram = factor @ factor.mT
        factor = a * factor + (b * gram + c * (gram @ gram)) @ factor
    return (matrix * factor).sum(dtype=torch.float64)


def trace_sqrt(covariance: Tensor) -> Tensor:
    """tr(C^{1/2}) of a symmetric matrix that is positive but for rounding; a 0-d float64 tensor.

    The nuclear norm of its Cholesky factor. For that a millionth of a millionth of the trace is added to the
    diagonal, more than the rounding of float64 products; a direction without noise then counts a millionth.

    Args:
        covariance: Float64. In float32 the rounding alone would count as a thousandth in every direction.
    """
    trace = covariance.diagonal().sum()
    # Of zeros: 0, not NaN. Not-finite ones stay so.
    ridge = torch.where(trace == 0, 1.0, 1e-12 * trace)
    lifted = covariance + torch.diag_embed(ridge.expand(len(covariance)))
    factor, _ = torch.linalg.cholesky_ex(lifted)
    largest = lifted.diagonal().max().sqrt()
    return torch.where(trace == 0, 0.0, largest * nuclear_norm((factor / largest).to(torch.float32)))
