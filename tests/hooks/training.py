"""Small training jobs on ranks, and the float64 reference that a measurement of them is held to."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.hooks.monitor import Monitor
from noisescale.moments import SampleGeometry, StepMoments, step_moments
from noisescale.wire import BlocksReport

DIMENSION = 4096
"""Of the Gaussian problem: so many that a thousand steps tell its noise scale to a percent."""


class Reports(list[BlocksReport]):
    """A destination that keeps what it is sent."""

    def __call__(self, report: BlocksReport) -> None:
        self.append(report)

    def sums(self) -> tuple[float, float, int]:
        """Of tr(Sigma), |G|^2 and the measured steps, over all that was reported."""
        totals = [block.sums[0] for report in self for block in report.blocks if block.sums]
        return (
            sum(total.trace_covariance for total in totals),
            sum(total.true_grad_sq_norm for total in totals),
            sum(block.measured_steps for report in self for block in report.blocks),
        )

    def noise_scale(self) -> float:
        """The ratio of the averages over all that was reported."""
        trace, signal, _ = self.sums()
        return trace / signal

    def skipped(self) -> int:
        """Steps that were to be measured and were not."""
        return sum(block.skipped_steps for report in self for block in report.blocks)


def mean_gradient_model() -> nn.Module:
    """A model whose gradient is the mean of its inputs: their noise is the gradients' noise."""
    return nn.Linear(DIMENSION, 1, bias=False)


def gaussian_inputs(count: int, generator: torch.Generator) -> Tensor:
    """Per-example gradients with |G|^2 = .01 and tr(Sigma) = 4: a noise scale of 400."""
    noise = torch.randn(count, DIMENSION, generator=generator) * (4.0 / DIMENSION) ** 0.5
    return noise + (0.01 / DIMENSION) ** 0.5


class SmallNet(nn.Module):
    """Several layers, a shared weight and a one-element parameter; 1,900 parameters or so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.middle = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = torch.tanh(self.middle(hidden)) + torch.tanh(self.middle(2 * hidden))
        result: Tensor = self.last(hidden * self.scale)
        return result


def small_net() -> nn.Module:
    """A SmallNet, the same every time."""
    torch.manual_seed(11)
    return SmallNet()


def batch_of(rank: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels for small_net, the same every time for a rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(count, 16, generator=generator)
    return inputs, (inputs[:, :4] + torch.randn(count, 4, generator=generator)).argmax(dim=1)


def loss_of(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    """The mean loss of one such batch."""
    inputs, labels = batch_of(rank, step, count)
    return nn.functional.cross_entropy(model(inputs), labels)


@dataclass
class Job:
    """A DDP training of small_net by SGD, with or without the hook.

    Attributes:
        weights: After the last step, by name.
        references: Per step, from every rank's own gradient in float64; only where asked for.
    """

    monitor: Monitor | None = None
    reports: Reports = field(default_factory=Reports)
    weights: dict[str, Tensor] = field(default_factory=dict)
    references: list[StepMoments] = field(default_factory=list)


def train(
    *,
    steps: int = 12,
    count: int | Sequence[int] = 8,
    measured: bool = True,
    reference: bool = False,
    ddp: dict[str, Any] | None = None,
    attach: dict[str, Any] | None = None,
    model: Callable[[], nn.Module] = small_net,
    loss: Callable[[nn.Module, int, int, int], Tensor] = loss_of,
    set_to_none: bool = True,
    micro_batches: int = 1,
    before_step: Callable[[nn.Module, int], None] | None = None,
    before_forward: Callable[[nn.Module, int], None] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Job:
    """One rank's whole job; every rank calls it alike.

    Args:
        count: Examples per micro-batch; a sequence says it per rank.
        reference: Take every step's moments by a second way too.
        before_step, before_forward: Called with the model and the step.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sizes = [count] * world_size if isinstance(count, int) else list(count)
    wrapped = DistributedDataParallel(model(), process_group=group, **(ddp or {}))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    job = Job()
    if measured:
        arguments: dict[str, Any] = {"every": 1, "report_to": job.reports, "run": "test"}
        job.monitor = noisescale.attach(wrapped, optimizer, **(arguments | (attach or {})))
    for step in range(steps):
        if before_forward is not None:
            before_forward(wrapped, step)
        if reference:
            job.references.append(
                reference_moments(wrapped, loss, step=step, sizes=sizes, micro_batches=micro_batches)
            )
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                number = step * micro_batches + micro_batch
                (loss(wrapped, rank, number, sizes[rank]) / micro_batches).backward()
        if before_step is not None:
            before_step(wrapped, step)
        optimizer.step()
    job.weights = {name: value.detach().clone() for name, value in wrapped.module.state_dict().items()}
    if job.monitor is not None:
        job.monitor.close()
    return job


def reference_moments(
    wrapped: DistributedDataParallel,
    loss: Callable[[nn.Module, int, int, int], Tensor],
    *,
    step: int,
    sizes: Sequence[int],
    micro_batches: int = 1,
) -> StepMoments:
    """One step's moments from the float64 gradients of every rank, taken on a copy of the module."""
    group = wrapped.process_group
    rank = dist.get_rank(group)
    alone = copy.deepcopy(wrapped.module)
    for parameter in alone.parameters():
        parameter.grad = None
    for micro_batch in range(micro_batches):
        (loss(alone, rank, step * micro_batches + micro_batch, sizes[rank]) / micro_batches).backward()
    pieces = [p.grad if p.grad is not None else torch.zeros_like(p) for p in alone.parameters()]
    own = torch.cat([piece.double().reshape(-1) for piece in pieces])
    every_rank = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(every_rank, own, group=group)
    gradients = torch.stack(every_rank)
    counts = [size * micro_batches for size in sizes]
    return step_moments(
        local_sq=float(gradients.square().sum(dim=1).mean()),
        global_sq=float(gradients.mean(dim=0).square().sum()),
        geometry=SampleGeometry.of(counts=counts, weights=[1 / len(counts)] * len(counts)),
    )


def sum_of(references: Sequence[StepMoments]) -> tuple[float, float]:
    """Of tr(Sigma) and of |G|^2."""
    return (
        sum(moments.trace_covariance for moments in references),
        sum(moments.true_grad_sq_norm for moments in references),
    )


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states hold the same weights, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextlib.contextmanager
def logged(name: str = "noisescale") -> Iterator[list[str]]:
    """What is logged meanwhile, as "LEVEL message"."""
    import logging

    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    handler = Keeper()
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
