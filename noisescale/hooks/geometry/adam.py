"""The noise scale of Adam's preconditioned steps.

B_adam = tr(P Sigma) / G'PG with P = 1 / (sqrt(v_hat) + eps), v_hat being the optimizer's bias-corrected
second moment of the step before: during backward that is what its state holds. Of the step itself it would
contain the gradient that it weighs, and bias both numbers.

To all-reduce (sum) on a measured step: one number, the weighted sum of the samples' weighted_square.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from noisescale.hooks.geometry.moments import no_scalar


def preconditioners(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """P of each parameter, from the state of the optimizer's last step.

    Call before the optimizer steps on the gradients to be weighed. Read-only and without a host
    synchronisation; allocates one buffer of the parameter's size each.

    Returns:
        Of the parameters' shapes and strides, float32 at least. None where the optimizer has no second moment
        of a parameter: before its first step, for a parameter it has never seen a gradient of (a frozen
        one), or which it does not have. Coordinates whose second moment is exactly 0 (a row of an embedding
        that was never looked up) get 0: they have no scale yet, and 1 / eps would drown all others.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return [_preconditioner(optimizer.state.get(p), groups.get(id(p))) for p in parameters]


def _preconditioner(state: Mapping[str, Any] | None, group: Mapping[str, Any] | None) -> Tensor | None:
    """P of one parameter. With amsgrad it is the running maximum that the step divides by."""
    if not state or group is None or "exp_avg_sq" not in state:
        return None
    second: Tensor = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    # On the CPU, or with capturable or fused on the device: either way not read by the host. Nor is beta2
    # copied to the device, which would make the host wait.
    steps = torch.as_tensor(state["step"], dtype=torch.float64)
    correction = (1 - group["betas"][1] ** steps).sqrt()
    root = second.to(torch.promote_types(second.dtype, torch.float32)).sqrt()
    return torch.where(root > 0, 1 / (root / correction.to(root.dtype) + group["eps"]), 0.0)


def in_storage_order(preconditioner: Tensor, *, parameter: Tensor) -> Tensor:
    """Flat, in the element order of the parameter's memory, which is that of DDP's buckets.

    A channels-last parameter's gradient lies in a bucket as its memory does, not in the order of its indices.
    """
    by_stride = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return preconditioner.permute(by_stride).reshape(-1)


def weighted_square(gradients: Sequence[Tensor], weighing: Sequence[Tensor | None]) -> Tensor:
    """g'Pg, a 0-d float64 tensor, over the parameters that have a P.

    Args:
        gradients: A tensor per parameter; a sample's or the averaged one.
        weighing: P of the same parameters, in the same element order.
    """
    pairs = [(g, p) for g, p in zip(gradients, weighing, strict=True) if p is not None]
    total = no_scalar(gradients[0].device if gradients else torch.device("cpu"))
    for gradient, p in pairs:
        wide = gradient.to(p.dtype)
        # By the root and then squared: the square of a gradient below 1e-19 alone is 0 in float32.
        total = total + (wide * p.sqrt()).square().sum(dtype=torch.float64)
    return total
