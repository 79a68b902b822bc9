"""Square norms of gradients, to float32's own precision.

Summing a long buffer in float32 loses digits: on a CPU one `vector_norm` over 25 million values
is off by up to 3%, which the noise scale multiplies by 1 + B_noise/B. Rows of 4,096 summed in
float64 are off by about 1e-7, at the cost of one read. An accelerator reduces as a tree, so
there one call over the whole buffer does.
"""

import torch
from torch import Tensor

ROW = 4096
"""Values summed in float32 before float64 takes over, on a CPU."""


def square_norm(values: Tensor) -> Tensor:
    """|values|^2 as a 0-d float64 tensor on the same device; never waits for the device.

    Args:
        values: Dense, of any shape and any floating dtype. Half precision is summed in float32:
            its own norm would overflow at elements of 300 and vanish at 1e-4.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    flat = values.detach().reshape(-1)
    if flat.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(flat, dtype=wide)
        return norm.double().square()
    whole = flat.numel() // ROW * ROW
    # A norm is taken per row and squared in float64: the float32 square of a gradient below
    # 1e-19 would be 0.
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=wide)
    tail: Tensor = torch.linalg.vector_norm(flat[whole:], dtype=wide)
    return rows.double().square().sum() + tail.double().square()
