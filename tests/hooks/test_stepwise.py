"""Captures whose step ends as the optimizer steps: they copy nothing, know their cost, and are not fooled."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import noisescale
from noisescale.hooks import micro_batches, stepwise
from noisescale.hooks.monitor import Monitor
from tests.hooks.training import Reports, logged, loss_of, same_bits, small_net

STEPS = 6


def alone(
    *,
    measured: bool = True,
    before_step: Callable[[nn.Module, int], None] | None = None,
) -> tuple[Reports, Monitor | None, dict[str, Tensor]]:
    """One process's training with 2 micro-batches per step."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reports = Reports()
    monitor = None
    if measured:
        monitor = noisescale.attach(model, optimizer, every=1, report_to=reports, samples="micro_batch")
    for step in range(STEPS):
        if before_step is not None:
            before_step(model, step)
        optimizer.zero_grad()
        for index in range(2):
            (loss_of(model, 0, 2 * step + index, 8) / 2).backward()
        optimizer.step()
    if monitor is not None:
        monitor.close()
    return reports, monitor, {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_no_gradient_is_copied() -> None:
    """Autograd keeps the tensor that backward made as the gradient, as it does without the monitor."""
    made: list[int] = []
    kept: list[bool] = []
    for measured in (False, True):
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if measured:
            monitor = noisescale.attach(model, optimizer, every=1, samples="micro_batch")
        loss = model(torch.ones(8, 64)).square().mean()
        model.weight.register_hook(lambda gradient: made.append(gradient.data_ptr()))
        loss.backward()
        assert model.weight.grad is not None
        kept.append(model.weight.grad.data_ptr() == made[-1])
        if measured:
            assert monitor._capture._squares.watching  # type: ignore[attr-defined]  # of this capture
            monitor.detach()
    assert kept == [True, True]


def test_the_cost_of_norms_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """every="auto" counts the time that the norms take in backward, of samples and of what they come to."""
    real = stepwise.square_norm

    def slow(values: Tensor) -> Tensor:
        time.sleep(0.002)
        return real(values)

    costs = {}
    for module in (micro_batches, stepwise):
        with monkeypatch.context() as patched:
            patched.setattr(module, "square_norm", slow)
            _, monitor, _ = alone()
        assert monitor is not None
        costs[module.__name__] = min(monitor._capture._measuring.meter._costs)  # type: ignore[attr-defined]  # as above
    # 9 parameters in 2 micro-batches: the sleeps alone take so long.
    assert all(cost >= 2 * 9 * 0.002 for cost in costs.values())


def freeze_and_release(model: nn.Module, step: int) -> None:
    model.get_submodule("middle").requires_grad_(step not in (2, 3))


def test_freezing_in_mid_run() -> None:
    """Parameters frozen after attaching, and released later, trouble neither training nor measuring."""
    plain = alone(measured=False, before_step=freeze_and_release)[2]
    with logged() as lines:
        reports, _, weights = alone(before_step=freeze_and_release)
    assert same_bits(plain, weights)
    assert (reports.sums()[2], reports.skipped(), lines) == (STEPS, 0, [])


def forward_only(model: nn.Module, step: int) -> None:
    if step in (2, 4):
        loss_of(model, 0, 1000, 8)


def test_forward_pass_without_backward() -> None:
    """A step with one forward pass too many is skipped, told once, and those around it count."""
    with logged() as lines:
        reports, _, _ = alone(before_step=forward_only)
    assert (reports.sums()[2], reports.skipped()) == (STEPS - 2, 2)
    assert len(lines) == 1
    assert "torch.no_grad()" in lines[0]


def break_hooks(model: nn.Module, step: int) -> None:
    if step == 2:

        def refuses(*arguments: object) -> None:
            raise RuntimeError("injected")

        parameter = model.get_parameter("scale")
        parameter.register_post_accumulate_grad_hook = refuses  # type: ignore[method-assign]  # the fault


def test_step_that_cannot_begin() -> None:
    """Failing to begin a step is told and stops measuring, and training goes on."""
    with logged() as lines:
        reports, _, _ = alone(before_step=break_hooks)
    assert len([line for line in lines if "failed on rank 0" in line]) == 1
    assert reports.sums()[2] == 2
