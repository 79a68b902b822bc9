"""The lesson that this project grew from: what more GPUs do to a gradient, on real ranks.

Its warmup, .16 .22 .28 .34 .40, is in tests/core/test_recommend.py.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ranks import Rank, Ranks
from tests.hooks.training import batch_of, small_net


def averaged_and_whole(rank: Rank) -> tuple[float, float]:
    """Largest difference between DDP's averaged gradient and one process's of the whole batch."""
    inputs, labels = batch_of(0, 7, 16 * rank.world_size)
    own = slice(16 * rank.rank, 16 * (rank.rank + 1))
    wrapped = DistributedDataParallel(small_net())
    nn.functional.cross_entropy(wrapped(inputs[own]), labels[own]).backward()
    alone = small_net()
    nn.functional.cross_entropy(alone(inputs), labels).backward()
    pairs = list(zip(wrapped.module.parameters(), alone.parameters(), strict=True))
    differences = [float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None]
    sizes = [float(b.grad.abs().max()) for _, b in pairs if b.grad is not None]
    assert len(differences) == len(pairs)
    return max(differences), max(sizes)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_averages_to_the_gradient_of_the_whole_batch(
    two_ranks: Ranks, four_ranks: Ranks, world_size: int
) -> None:
    """2 or 4 ranks with a batch each give the gradient of one process with all of it."""
    ranks = {2: two_ranks, 4: four_ranks}[world_size]
    for difference, size in ranks.run(averaged_and_whole):
        assert difference < 1e-6 * size + 1e-7


def test_gradient_spread_halves_per_fourfold_batch() -> None:
    """The standard deviation of a gradient over batches falls as 1/sqrt(B)."""
    torch.manual_seed(2)
    model = small_net()
    spreads = []
    for size in (4, 16, 64):
        gradients = []
        for draw in range(300):
            inputs, labels = batch_of(size, draw, size)
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            gradients.append(
                torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            )
        spreads.append(float(torch.stack(gradients).var(dim=0).sum().sqrt()))
    assert spreads[0] / spreads[1] == pytest.approx(2, rel=0.05)
    assert spreads[1] / spreads[2] == pytest.approx(2, rel=0.05)
