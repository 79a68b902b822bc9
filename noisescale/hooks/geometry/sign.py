"""The l1 noise scale, of signSGD, Signum, Lion, and of Adam read as sign descent.

B_sign = ||sigma||_1^2 / ||G||_1^2 (arXiv 2602.03001), with sigma_i the standard deviation over examples of
coordinate i of the gradient. Sign descent lowers the loss by the l1 norm of the gradient, the dual of the
largest coordinate, which is why the l1 norm measures both.

To all-reduce (sum) on a measured step: the signed sum of halves.add_signed, one buffer of gradient size, and
four numbers of halves.half_terms. With two halves sigma needs no buffer of squares: for Gaussian noise
E|g_a - g_b| is sigma times a constant, in every coordinate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from noisescale.hooks.geometry.halves import HALF_NORMAL_MEAN, Halves, Norms, working_dtype
from noisescale.hooks.geometry.moments import no_scalar


def finish(means: Sequence[Tensor], signed: Sequence[Tensor], halves: Halves) -> Norms:
    """The l1 norms of one step.

    Args:
        means: The averaged gradient, a tensor per parameter; frozen parameters left out.
        signed: The signed sums of the same parameters, all-reduced; in the same element order.
        halves: Of the step's samples.

    Returns:
        The norms, summed over the parameters. Without any parameter, zeros.
    """
    device = halves.residual.device
    noise, plain, half = no_scalar(device), no_scalar(device), no_scalar(device)
    for mean, difference in zip(means, signed, strict=True):
        whole = mean.to(working_dtype(mean))
        a, b = halves.means(whole, difference)
        noise = noise + _l1(a - b)
        plain = plain + _l1(whole)
        half = half + (_l1(a) + _l1(b)) / 2
    return Norms(
        noise=noise / (HALF_NORMAL_MEAN * halves.difference_residual.sqrt()),
        plain=plain,
        extrapolated=halves.extrapolated(whole=plain, half=half),
    )


def _l1(values: Tensor) -> Tensor:
    """Summed in float64: one float32 total over millions of values loses digits."""
    return values.abs().sum(dtype=torch.float64)
