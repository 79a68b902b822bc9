"""Per-example gradients at normalization layers, in one process without accumulation."""

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import noisescale
from noisescale.blocks import Block
from noisescale.errors import InvalidInputError, UnsupportedModelError
from noisescale.estimate import estimate
from noisescale.hooks import norm_layers
from noisescale.hooks.norm_layers import NOT_THEIR_SUM
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


def reference(model: nn.Module, step: int, sizes: Sequence[int] = (EXAMPLES,)) -> tuple[float, float]:
    """A step's moments from torch.func's per-example gradients of the norm layers, in float64.

    Args:
        sizes: Of the micro-batches; an example weighs 1 / (micro-batches x the size of its own).
    """
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
    weights = [1 / (len(sizes) * size) for size in sizes for _ in range(size)]
    weighed = torch.tensor(weights, dtype=torch.float64)
    moments = step_moments(
        local_sq=float(weighed @ gradients.square().sum(dim=1)),
        global_sq=float((weighed @ gradients).square().sum()),
        geometry=SampleGeometry.of(counts=[1] * EXAMPLES, weights=weights),
    )
    return moments.trace_covariance, moments.true_grad_sq_norm


def plain_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


def train(
    make: Callable[[], nn.Module],
    *,
    measured: bool = True,
    steps: int = 6,
    sizes: Sequence[int] = (EXAMPLES,),
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    **attach: Any,
) -> tuple[Reports, list[tuple[float, float]], dict[str, Tensor]]:
    """One process's job; what was reported, what torch.func says, and the weights it ends with."""
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
            wanted.append(reference(model, step, sizes))
        optimizer.zero_grad()
        inputs, labels = batch(step)
        for part, answers in zip(inputs.split(list(sizes)), labels.split(list(sizes)), strict=True):
            ((loss or plain_loss)(model, part, answers) / len(sizes)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    if monitor is not None:
        monitor.close()
    return reports, wanted, dict(model.state_dict())


@pytest.mark.parametrize("make", [Sequences, Images])
@pytest.mark.parametrize("sizes", [(12,), (4, 4, 4), (7, 3, 2)], ids=["one", "three", "uneven"])
def test_norm_layers_equal_torch_func(make: Callable[[], nn.Module], sizes: tuple[int, ...]) -> None:
    """Exact against torch.func for these parameters, with one micro-batch a step, three, and uneven ones."""
    reports, wanted, weights = train(make, sizes=sizes)
    blocks = [block for report in reports for block in report.blocks]
    (entry,) = {sums.key for block in blocks for sums in block.sums}
    assert entry == ("total", "norm_layers")
    trace, signal, steps = reports.sums()
    assert steps == len(wanted)
    assert trace == pytest.approx(sum(t for t, _ in wanted), rel=1e-4)
    assert signal == pytest.approx(sum(s for _, s in wanted), rel=1e-3, abs=1e-5 * trace)
    assert same_bits(weights, train(make, measured=False, sizes=sizes)[2])


def checked(make: Callable[[], nn.Module], **job: Any) -> None:
    """A job's sums are torch.func's, and its weights those without the monitor."""
    reports, wanted, weights = train(make, **job)
    trace, signal, steps = reports.sums()
    assert steps == len(wanted)
    assert trace == pytest.approx(sum(t for t, _ in wanted), rel=1e-4)
    assert signal == pytest.approx(sum(s for _, s in wanted), rel=1e-3, abs=1e-5 * trace)
    assert same_bits(weights, train(make, measured=False, **job)[2])


def test_the_cost_of_norms_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """every="auto" counts the time that the layers' norms take, in forward and in backward."""
    real = norm_layers._per_example

    def slow(*arguments: Any) -> Any:
        time.sleep(0.005)
        return real(*arguments)

    monkeypatch.setattr(norm_layers, "_per_example", slow)
    model = Sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with noisescale.attach(model, optimizer, every=1, samples="norm_layers") as monitor:
        for step in range(8):
            optimizer.zero_grad()
            plain_loss(model, *batch(step)).backward()
            optimizer.step()
    costs = monitor._capture._measuring.meter._costs  # type: ignore[attr-defined]  # of this capture
    # LayerNorm is used twice and RMSNorm once: the sleeps alone take so long.
    assert min(costs) >= 3 * 0.005


class Named(Sequences):
    """Calls its layers by keyword, and changes their outputs in place."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu_(self.norm(input=self.first(x)))
        hidden = self.rms(hidden)
        hidden += 1
        result: Tensor = self.last(hidden).mean(dim=1)
        return result


def test_layers_called_by_keyword_and_changed_in_place() -> None:
    """A layer's input may come by keyword, and its output may be overwritten, as ReLU(inplace=True) does."""
    checked(Named)


class Checkpointed(Sequences):
    """One norm layer is run again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if self.norm.weight.dtype == torch.float64:  # the reference: torch.func knows no checkpoints
            hidden = self._inside(x)
        else:
            x = x.clone().requires_grad_()
            hidden = checkpoint(self._inside, x, use_reentrant=self.reentrant)
        result: Tensor = self.last(self.rms(hidden)).mean(dim=1)
        return result

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.first(x)))


class Reentrant(Checkpointed):
    """By reentrant checkpointing."""

    reentrant = True


@pytest.mark.parametrize("make", [Checkpointed, Reentrant])
def test_checkpointed_norm_layers(make: Callable[[], nn.Module]) -> None:
    """A layer that is run again in backward counts once."""
    checked(make)


def looked_at(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """A loss whose gradients are also taken by torch.autograd.grad()."""
    inputs = inputs.clone().requires_grad_()
    output: Tensor = model(inputs)
    torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    return nn.functional.cross_entropy(output, labels)


def test_autograd_grad_is_not_counted() -> None:
    """What torch.autograd.grad() sends through the layers is no part of the step."""
    checked(Sequences, loss=looked_at)


def penalised(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """A loss with a gradient penalty, which reaches the layers' weights past their outputs."""
    inputs = inputs.clone().requires_grad_()
    output: Tensor = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return nn.functional.cross_entropy(output, labels) + slope.square().mean()


class OtherAxis(nn.LayerNorm):
    """Normalizes the second dimension of images, with LayerNorm's name and parameters."""

    def forward(self, x: Tensor) -> Tensor:
        normal = nn.functional.layer_norm(
            x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return normal.permute(0, 3, 1, 2)


class OtherImages(nn.Module):
    """As wide as its images are, so that the wrong axis would fit too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = OtherAxis(6)
        self.last = nn.Linear(6 * 30, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x.view(-1, 1, 5, 6))))
        result: Tensor = self.last(hidden.flatten(1))
        return result


@pytest.mark.parametrize(
    ("make", "loss"), [(Sequences, penalised), (OtherImages, plain_loss)], ids=["penalty", "own-forward"]
)
def test_gradients_that_are_not_the_examples_sum_are_refused(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> None:
    """Where the examples' gradients do not add up to the layer's: one error, no figure, same weights."""
    with logged() as lines:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        reports = Reports()
        with noisescale.attach(model, optimizer, every=1, report_to=reports, samples="norm_layers"):
            for step in range(12):
                optimizer.zero_grad()
                loss(model, *batch(step)).backward()
                optimizer.step()
    assert reports.sums()[2] == 0
    assert [line for line in lines if line.startswith("ERROR")] == [f"ERROR {NOT_THEIR_SUM}"]


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
        (nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3)), {}, "mix examples"),
        (Sequences(), {"batch_unit": "tokens"}, "batch_unit"),
        (Sequences(), {"geometry": "sign"}, "geometry"),
        (Sequences(), {"geometry": ["euclidean", "adam"]}, "geometry"),
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


@pytest.mark.parametrize("geometry", ["euclidean", ["euclidean"], ("euclidean", "euclidean"), []])
def test_the_euclidean_geometry_is_no_wish(geometry: Any) -> None:
    """geometry= may name what is there anyway, in any form that other captures take."""
    model = Sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noisescale.attach(model, optimizer, samples="norm_layers", geometry=geometry).close()
    with pytest.raises(InvalidInputError, match="euklidean"):
        noisescale.attach(model, optimizer, samples="norm_layers", geometry="euklidean")
