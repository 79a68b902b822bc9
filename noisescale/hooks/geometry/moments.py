"""Moments that stay on the device: float64 scalars, never read by the host here.

A step's moments in any geometry are a noise `trace_covariance` (S) and a signal
`true_grad_sq_norm` (G), such that mean(S) / mean(G) over steps is the noise scale, in examples.
Once the host has them they are a noisescale.moments.StepMoments.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceMoments:
    """One step's moments, 0-d float64 tensors.

    Attributes:
        trace_covariance: S, what tr(Sigma) is in this geometry; per example.
        true_grad_sq_norm: G, what |G|^2 is in this geometry. One step's value may be negative.
    """

    trace_covariance: Tensor
    true_grad_sq_norm: Tensor


def quadratic_moments(
    *, local_sq: Tensor, global_sq: Tensor, spread: float | Tensor, residual: float | Tensor
) -> DeviceMoments:
    """noisescale.moments.step_moments, on the device.

    Right for any squared norm g'Pg with P fixed before the gradients are seen.

    Args:
        local_sq: A, the weighted mean over samples of g_k' P g_k; float64.
        global_sq: Q, the same of the averaged gradient; float64.
        spread: sum_k w_k (1 - w_k) / n_k, as of noisescale.moments.SampleGeometry. Where it is zero (one
            sample) the moments are not finite.
        residual: sum_k w_k^2 / n_k.
    """
    trace_covariance = (local_sq - global_sq) / spread
    return DeviceMoments(
        trace_covariance=trace_covariance, true_grad_sq_norm=global_sq - trace_covariance * residual
    )


def no_scalar(device: torch.device) -> Tensor:
    """A float64 zero to add to."""
    return torch.zeros((), dtype=torch.float64, device=device)
