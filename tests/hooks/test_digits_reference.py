"""On real data, the hook's noise scale is that of per-example gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.estimate import Estimate
from noisescale.hooks.digits import digits, net
from tests.hooks.ranks import Rank, Ranks

TRAINED_STEPS = 300
MEASURED_STEPS = 800


def trained_net(images: Tensor, labels: Tensor) -> nn.Module:
    """A fixed point of the training: the same weights on every rank."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(TRAINED_STEPS):
        chosen = torch.randint(len(images), (32,))
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model


def brute_force(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """tr(Sigma) and |G|^2 over the data set, from the gradient of every example, in float64."""
    model = model.double()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, weights, (image[None],))
        return functional.cross_entropy(logits, label[None])

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, images.double(), labels)
    gradients = torch.cat([g.reshape(len(images), -1) for g in per_example.values()], dim=1)
    mean = gradients.mean(dim=0)
    return float((gradients - mean).square().sum(dim=1).mean()), float(mean.square().sum())


def fixed_point_job(rank: Rank) -> tuple[Estimate, float, float]:
    """Measure with the learning rate at 0; the estimate and the reference."""
    images, labels = digits()[0].tensors
    start = trained_net(images, labels)
    model = DistributedDataParallel(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(100 + rank.rank)
    with noisescale.attach(model, optimizer, every=1) as monitor:
        for _ in range(MEASURED_STEPS):
            chosen = torch.randint(len(images), (16,), generator=generator)
            optimizer.zero_grad()
            functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    trace, signal = brute_force(start, images, labels) if rank.rank == 0 else (0.0, 0.0)
    return monitor.estimate(), trace, signal


def test_noise_scale_of_the_digits_net(two_ranks: Ranks) -> None:
    """At a fixed point, brute force over all images lies in the interval that 2 ranks' estimate states."""
    estimate, trace, signal = two_ranks.run(fixed_point_job)[0]
    assert estimate.measured_steps == MEASURED_STEPS
    assert estimate.lower is not None
    assert estimate.upper is not None
    assert estimate.lower < trace / signal < estimate.upper
    assert estimate.upper / estimate.lower < 3  # an interval that says something
    assert estimate.trace_covariance == pytest.approx(trace, rel=0.1)
