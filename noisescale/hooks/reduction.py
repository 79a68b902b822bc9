"""The one small all-reduce of a measured step: what is in it, and the group it runs on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a packet, besides its square norms; all of it is summed over ranks.

    Without a sample it is all zeros, but for what is told.

    Attributes:
        active: 1 if the rank has a sample, 0 if it ran out of data (Join) or cannot measure.
        samples: How many it has: 1, or its micro-batches.
        weight_over_count: sum_k w_k / n_k over its samples, their weights summing to 1 on the rank;
            0 if it is not active.
        squared_weight_over_count: sum_k w_k^2 / n_k, likewise.
        count: Examples (or tokens) in the sample.
        examples: Examples (or tokens) since the measured step before, this one included.
        failed: 1 if measuring failed on this rank: all are to stop.
        leaving: 1 if this rank was told to stop: all are to stop.
        every: Rank 0's wish; 0 from all others, so that the sum is the wish.
    """

    active: int = 0
    samples: int = 0
    weight_over_count: float = 0.0
    squared_weight_over_count: float = 0.0
    count: int = 0
    examples: int = 0
    failed: int = 0
    leaving: int = 0
    every: int = 0

    def numbers(self) -> list[float]:
        """In the order of CONTROL, without `carried`."""
        sizes = (self.weight_over_count, self.squared_weight_over_count)
        fields = (self.active, self.samples, *sizes, self.count, self.examples)
        return [float(value) for value in (*fields, self.failed, self.leaving, self.every)]


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet after the all-reduce: sums over ranks.

    Attributes:
        carried: Above 0, the samples are not what they seem. Under DDP the square norm of a gradient that
            was there before a backward pass that should have begun from zero: micro-batches are accumulated
            without no_sync(). At normalization layers, parameters whose gradient is not the examples' sum.
        local_squares: Per layer group, the sum over active ranks of |g_k|^2.
    """

    active: int
    samples: int
    weight_over_count: float
    squared_weight_over_count: float
    count: int
    examples: int
    failed: int
    leaving: int
    every: int
    carried: float
    local_squares: tuple[float, ...]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> "Packet":
        """From the packet's numbers, on the host."""
        active, samples, over_count, squared_over_count, count, examples, *rest = numbers
        failed, leaving, every, carried, *squares = rest
        return cls(
            active=round(active),
            samples=round(samples),
            weight_over_count=over_count,
            squared_weight_over_count=squared_over_count,
            count=round(count),
            examples=round(examples),
            failed=round(failed),
            leaving=round(leaving),
            every=round(every),
            carried=carried,
            local_squares=tuple(squares),
        )

    @property
    def finite(self) -> bool:
        """Whether no rank's gradient held an infinity or a NaN; the same on every rank."""
        return all(math.isfinite(square) for square in self.local_squares)


def pack(share: Share, *, carried: Tensor | None, local_squares: Tensor) -> Tensor:
    """One rank's packet, float64, on the device of its square norms.

    Args:
        carried: 0-d float64, or None for 0.
        local_squares: One per layer group, float64.
    """
    device = local_squares.device
    numbers = torch.tensor(share.numbers(), dtype=torch.float64).to(device, non_blocking=True)
    before = torch.zeros(1, dtype=torch.float64, device=device) if carried is None else carried.reshape(1)
    return torch.cat([numbers, before.to(device, non_blocking=True), local_squares])


class Done:
    """The work of summing over one process, which is no work."""

    def is_completed(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """Does not."""


def sum_over_ranks(packet: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Start the all-reduce of a packet, in place; answers its dist.Work. None is one process alone."""
    if group is None:
        return Done()
    return dist.all_reduce(packet, group=group, async_op=True)


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A process group of the same ranks that nothing else uses; None of None, one process alone.

    On the model's own group an inner hook's collectives could come in another order on another
    rank. Every rank of `group` calls this, and no other needs to.
    """
    if group is None:
        return None
    made = dist.new_group(
        ranks=dist.get_process_group_ranks(group),
        backend=dist.get_backend(group),
        use_local_synchronization=True,
        group_desc="noisescale",
    )
    if not isinstance(made, dist.ProcessGroup):
        raise RuntimeError("this process is not one of the ranks of the model's process group")
    return made


def agree_on_every(every: int, *, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Rank 0's number, on every rank; waits for all of them, once, when attaching."""
    if group is None:
        return every
    number = torch.tensor([every if dist.get_rank(group) == 0 else 0], dtype=torch.float64, device=device)
    dist.all_reduce(number, group=group)
    agreed: float = number.tolist()[0]
    return round(agreed)
