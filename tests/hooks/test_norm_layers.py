"""Per-example gradients at normalization layers, in one process without accumulation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import noisescale
from noisescale.blocks import Block
from noisescale.errors import UnsupportedModelError
from noisescale.estimate import estimate
from noisescale.moments import SampleGeometry, step_moments
from noisescale.recommend import recommend_run
from noisescale.wire import RunInfo
from tests.hooks.training import Reports, logged, same_bits

EXAMPLES = 12


class Sequences(nn.Module):
    """LayerNorm over sequences, used twice; RMSNorm; a norm without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.rms = nn.RMSNorm(10)
        self.bare = nn.LayerNorm(10, elementwise_affine=False)
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        hidden = torch.tanh(self.rms(self.norm(hidden + 0.1)))
        result: Tensor = self.last(self.bare(hidden)).mean(dim=1)
        return result


class Images(nn.Module):
    """GroupNorm over images, without a bias gradient; LayerNorm over two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.groups = nn.GroupNorm(4, 8)
        self.groups.bias.requires_grad_(False)
        self.plane = nn.LayerNorm((5, 6))
        self.last = nn.Linear(8 * 30, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.groups(self.first(x.view(-1, 1, 5, 6))))
        result: Tensor = self.last(self.plane(hidden).flatten(1))
        return result


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(EXAMPLES, 5, 6, generator=generator), torch.randint(
        0, 3, (EXAMPLES,), generator=generator
    )


def reference(model: nn.Module, step: int) -> tuple[float, float]:
    """A step's moments from torch.func's per-example gradients of the norm layers, in float64."""
    alone = copy.deepcopy(model).double()
    own = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
    names = {
        f"{prefix}.{name}"
        for prefix, layer in alone.named_modules()
        if isinstance(layer, own)
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    parameters = {name: value.detach() for name, value in alone.named_parameters()}
    chosen = {name: parameters[name] for name in names}
    inputs, labels = batch(step)

    def loss(some: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output: Tensor = functional_call(alone, {**parameters, **some}, (image[None],))
        return nn.functional.cross_entropy(output, label[None])

    rows = vmap(grad(loss), in_dims=(None, 0, 0))(chosen, inputs.double(), labels)
    gradients = torch.cat([row.reshape(EXAMPLES, -1) for row in rows.values()], dim=1)
    moments = step_moments(
        local_sq=float(gradients.square().sum(dim=1).mean()),
        global_sq=float(gradients.mean(dim=0).square().sum()),
        geometry=SampleGeometry.of(counts=[1] * EXAMPLES, weights=[1 / EXAMPLES] * EXAMPLES),
    )
    return moments.trace_covariance, moments.true_grad_sq_norm


def train(
    make: Callable[[], nn.Module], *, measured: bool = True, steps: int = 6, split: int = 1, **attach: Any
) -> tuple[Reports, list[tuple[float, float]], dict[str, Tensor]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reports = Reports()
    monitor = None
    if measured:
        monitor = noisescale.attach(
            model, optimizer, every=1, report_to=reports, samples="norm_layers", **attach
        )
    wanted = []
    for step in range(steps):
        if measured:
            wanted.append(reference(model, step))
        optimizer.zero_grad()
        inputs, labels = batch(step)
        for part, answers in zip(inputs.chunk(split), labels.chunk(split), strict=True):
            (nn.functional.cross_entropy(model(part), answers) / split).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    if monitor is not None:
        monitor.close()
    return reports, wanted, dict(model.state_dict())


@pytest.mark.parametrize("make", [Sequences, Images])
@pytest.mark.parametrize("split", [1, 3])
def test_norm_layers_equal_torch_func(make: Callable[[], nn.Module], split: int) -> None:
    """Exact against torch.func for these parameters, with one micro-batch a step and with three."""
    reports, wanted, weights = train(make, split=split)
    blocks = [block for report in reports for block in report.blocks]
    (entry,) = {sums.key for block in blocks for sums in block.sums}
    assert entry == ("total", "norm_layers")
    trace, signal, steps = reports.sums()
    assert steps == len(wanted)
    assert trace == pytest.approx(sum(t for t, _ in wanted), rel=1e-4)
    assert signal == pytest.approx(sum(s for _, s in wanted), rel=1e-3, abs=1e-5 * trace)
    assert same_bits(weights, train(make, measured=False, split=split)[2])


def test_labelled_as_a_proxy() -> None:
    """The monitor, the estimate and the advice say that it is of the norm layers, with low confidence."""
    reports, _, _ = train(Sequences, steps=40)
    blocks: list[Block] = [block for report in reports for block in report.blocks]
    assert estimate(blocks).measured_steps == 0
    info = reports[-1].run
    assert info.samples == "norm_layers"
    advice = recommend_run(blocks, RunInfo(optimizer="sgd"))
    assert advice.noise_scale.geometry == "norm_layers"
    assert any("stands in" in assumption for assumption in advice.assumed)
    if advice.confidence != "none":
        assert advice.confidence == "low"
        assert any("norm_layers" in reason for reason in advice.confidence_reasons)


def test_monitor_answers() -> None:
    """estimate() and detach() work as for other captures."""
    model = Sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = noisescale.attach(model, optimizer, every=1, samples="norm_layers")
    for step in range(5):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    found = monitor.estimate()
    assert (found.measured_steps, found.geometry, found.global_batch_size) == (5, "norm_layers", EXAMPLES)
    monitor.detach()
    assert not any(module._forward_hooks for module in model.modules())


class Transposed(nn.Module):
    """The batch is the second dimension of what the norm layer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(x.transpose(0, 1))).mean(dim=0)
        return result


def test_batch_that_is_not_first_is_refused() -> None:
    """An input whose first dimension is not the batch: one error, nothing measured, training goes on."""
    with logged() as lines:
        model = Transposed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        reports = Reports()
        with noisescale.attach(model, optimizer, every=1, report_to=reports, samples="norm_layers"):
            for step in range(4):
                inputs, labels = batch(step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    assert reports.sums()[2] == 0
    assert len([line for line in lines if line.startswith("ERROR")]) == 1


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        (nn.Linear(3, 3), {}, "no LayerNorm"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), {}, "BatchNorm mixes"),
        (Sequences(), {"batch_unit": "tokens"}, "batch_unit"),
        (Sequences(), {"geometry": "sign"}, "geometry"),
        (Sequences(), {"groups": ["*"]}, "groups"),
        (Sequences(), {"loss_reduction": "global_mean"}, "loss_reduction"),
    ],
)
def test_refusals(model: nn.Module, arguments: dict[str, Any], words: str) -> None:
    """What these layers cannot tell is refused."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(UnsupportedModelError) as raised:
        noisescale.attach(model, optimizer, samples="norm_layers", **arguments)
    assert words in str(raised.value)
