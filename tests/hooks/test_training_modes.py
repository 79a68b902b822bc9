"""Compiled, checkpointed, autocast, penalised: in each way of training the measurement is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import noisescale
from noisescale.errors import UnsupportedModelError
from tests.hooks.ranks import Rank, Ranks
from tests.hooks.test_ddp import check_against_reference
from tests.hooks.training import SmallNet, batch_of, loss_of, same_bits, small_net, train

_compiled: dict[int, Any] = {}


def compiled_outside(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    """The loss through torch.compile(DDP(module))."""
    if id(model) not in _compiled:
        _compiled[id(model)] = (model, torch.compile(model, backend="aot_eager"))
    inputs, labels = batch_of(rank, step, count)
    return nn.functional.cross_entropy(_compiled[id(model)][1](inputs), labels)


def compiled_inside() -> nn.Module:
    """The module of DDP(torch.compile(module))."""
    compiled: nn.Module = torch.compile(small_net(), backend="aot_eager")  # type: ignore[assignment]  # it is one
    return compiled


def job_with_mode(rank: Rank, *, mode: Any, outside: bool, samples: str) -> None:
    """12 steps with one setting of torch._dynamo's optimize_ddp."""
    torch._dynamo.reset()
    _compiled.clear()
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = mode
    try:
        where: dict[str, Any] = {"loss": compiled_outside} if outside else {"model": compiled_inside}
        job = train(reference=samples == "rank", attach={"samples": samples}, **where)
        plain = train(reference=True)
        if samples == "rank":
            check_against_reference(rank, job)
        elif rank.rank == 0:
            assert job.reports.sums() == pytest.approx(plain.reports.sums(), rel=1e-4)
    finally:
        torch._dynamo.config.optimize_ddp = before
        torch._dynamo.reset()


@pytest.mark.parametrize(
    "mode",
    [True, "ddp_optimizer", False, "no_optimization", "python_reducer_without_compiled_forward"],
    ids=str,
)
@pytest.mark.parametrize("outside", [True, False], ids=["compile-of-ddp", "ddp-of-compile"])
@pytest.mark.parametrize("samples", ["rank", "micro_batch"])
def test_compiled(two_ranks: Ranks, mode: Any, outside: bool, samples: str) -> None:
    """torch.compile of the module or of the DDP wrapper, in every mode whose buckets hooks can see."""
    two_ranks.run(job_with_mode, mode=mode, outside=outside, samples=samples)


def python_reducer_job(rank: Rank) -> str:
    """A DDP model made under the mode in which hooks get no buckets."""
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        model = DistributedDataParallel(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(UnsupportedModelError) as raised:
            noisescale.attach(model, optimizer)
        return str(raised.value)
    finally:
        torch._dynamo.config.optimize_ddp = before


def test_python_reducer_is_refused(two_ranks: Ranks) -> None:
    """optimize_ddp="python_reducer" hands hooks no buckets: an error that says what to set."""
    for message in two_ranks.run(python_reducer_job):
        assert "python_reducer" in message
        assert "ddp_optimizer" in message


class Checkpointed(SmallNet):
    """SmallNet with its middle under activation checkpointing."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = checkpoint(self.inner, hidden, use_reentrant=self.reentrant)
        result: Tensor = self.last(hidden * self.scale)
        return result

    def inner(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.middle(hidden)) + torch.tanh(self.middle(2 * hidden))


class Reentrant(Checkpointed):
    """With reentrant checkpoints."""

    reentrant = True


def checkpointed_job(rank: Rank, *, make: Callable[[], nn.Module], ddp: dict[str, Any], samples: str) -> bool:
    def seeded() -> nn.Module:
        torch.manual_seed(11)
        return make()

    job = train(model=seeded, reference=samples == "rank", ddp=ddp, attach={"samples": samples})
    plain = train(model=seeded, measured=False, ddp=ddp)
    if samples == "rank":
        check_against_reference(rank, job)
    else:
        without = train(attach={"samples": samples})
        if rank.rank == 0:
            assert job.reports.sums() == pytest.approx(without.reports.sums(), rel=1e-4)
    return same_bits(job.weights, plain.weights)


@pytest.mark.parametrize("samples", ["rank", "micro_batch"])
@pytest.mark.parametrize("make", [Checkpointed, Reentrant])
def test_checkpointed(two_ranks: Ranks, make: Callable[[], nn.Module], samples: str) -> None:
    """Activation checkpointing of both kinds, of a weight used twice inside one checkpoint."""
    ddp = {"static_graph": True}
    assert all(two_ranks.run(checkpointed_job, make=make, ddp=ddp, samples=samples))


def autocast_loss(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, rank, step, count)


def input_penalty(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    """The loss and the norm of its gradient by the inputs, as in a gradient penalty."""
    inputs, labels = batch_of(rank, step, count)
    inputs.requires_grad_(True)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + gradient.square().sum()


def loss_job(rank: Rank, *, loss: Callable[..., Tensor], samples: str) -> bool:
    job = train(loss=loss, reference=samples == "rank", attach={"samples": samples})
    plain = train(loss=loss, measured=False)
    by_rank = train(loss=loss)
    if samples == "rank":
        check_against_reference(rank, job, rel=1e-3)
    elif rank.rank == 0:
        assert job.reports.sums() == pytest.approx(by_rank.reports.sums(), rel=1e-4)
    return same_bits(job.weights, plain.weights)


@pytest.mark.parametrize("samples", ["rank", "micro_batch"])
@pytest.mark.parametrize("loss", [autocast_loss, input_penalty])
def test_losses(two_ranks: Ranks, loss: Callable[..., Tensor], samples: str) -> None:
    """bf16 autocast, and a penalty on the gradient by the inputs."""
    assert all(two_ranks.run(loss_job, loss=loss, samples=samples))


def bf16_net() -> nn.Module:
    return small_net().to(torch.bfloat16)


def bf16_loss(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    inputs, labels = batch_of(rank, step, count)
    return nn.functional.cross_entropy(model(inputs.to(torch.bfloat16)).float(), labels)


def bf16_job(rank: Rank) -> bool:
    job = train(model=bf16_net, loss=bf16_loss, reference=True)
    plain = train(model=bf16_net, loss=bf16_loss, measured=False)
    # The averaged gradient is rounded to 8 bits by the reduction itself.
    check_against_reference(rank, job, rel=0.02)
    return same_bits(job.weights, plain.weights)


def test_bf16_model(two_ranks: Ranks) -> None:
    """A model in bf16: right to the rounding of its own gradients."""
    assert all(two_ranks.run(bf16_job))
