"""Every way of taking gradients, on the same two problems: what a table and a test are made of.

The synthetic problem's noise scale is 400 by construction. The real one is the digits net at a fixed
point of its training, whose noise scale brute force over the data set tells.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.estimate import Estimate
from noisescale.hooks.digits import digits, net
from tests.hooks.ranks import Rank
from tests.hooks.test_digits_reference import brute_force, trained_net
from tests.hooks.training import gaussian_inputs, mean_gradient_model

GLOBAL_BATCH = 64
STEPS = {"synthetic": 600, "digits": 300}
SYNTHETIC_NOISE_SCALE = 400.0

Problem = Literal["synthetic", "digits"]


@dataclass(frozen=True)
class Capture:
    """One way of training, and of taking its gradients.

    Attributes:
        ranks: Processes; 1 is one without DDP.
        micro_batches: Per rank and step; the global batch is always the same.
        samples: As of attach().
        wrap: What is done to the module.
        dtype: Of the weights.
        autocast: Whether the forward runs in bf16 autocast with a loss scale.
    """

    ranks: int
    micro_batches: int = 1
    samples: str | None = None
    wrap: Literal["ddp", "ddp-of-compile", "compile-of-ddp", "fsdp2", "hsdp-2x2", "none"] = "ddp"
    dtype: torch.dtype = torch.float32
    autocast: bool = False


CAPTURES: dict[str, Capture] = {
    "DDP": Capture(2),
    "DDP, 4 ranks": Capture(4),
    "DDP, 2 micro-batches": Capture(2, 2),
    "DDP, 8 micro-batches": Capture(2, 8),
    "DDP, micro-batch samples": Capture(2, 1, "micro_batch"),
    "DDP, 2 micro-batch samples": Capture(2, 2, "micro_batch"),
    "DDP, 8 micro-batch samples": Capture(2, 8, "micro_batch"),
    "DDP of compiled module": Capture(2, wrap="ddp-of-compile"),
    "compiled DDP": Capture(2, wrap="compile-of-ddp"),
    "DDP, autocast and loss scale": Capture(2, autocast=True),
    "DDP, bf16 weights": Capture(2, dtype=torch.bfloat16),
    "FSDP2": Capture(2, wrap="fsdp2"),
    "FSDP2, 2 micro-batches": Capture(2, 2, wrap="fsdp2"),
    "HSDP 2x2": Capture(4, wrap="hsdp-2x2"),
    "one process, 2 micro-batches": Capture(1, 2, "micro_batch", "none"),
    "one process, 8 micro-batches": Capture(1, 8, "micro_batch", "none"),
}


def measure(rank: Rank, *, name: str, problem: Problem) -> tuple[Estimate, float]:
    """One capture's estimate on one problem, and the truth; both on rank 0."""
    capture = CAPTURES[name]
    module, loss, truth = _problem(problem, capture)
    model, forward = _wrapped(module, capture)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=capture.autocast)
    arguments: dict[str, Any] = {"samples": capture.samples} if capture.samples else {}
    if capture.autocast:
        arguments["grad_scaler"] = scaler
    generator = torch.Generator().manual_seed(100 + rank.rank)
    count = GLOBAL_BATCH // (capture.ranks * capture.micro_batches)
    with noisescale.attach(model, optimizer, every=1, **arguments) as monitor:
        for _ in range(STEPS[problem]):
            optimizer.zero_grad()
            for index in range(capture.micro_batches):
                last = index == capture.micro_batches - 1
                with (
                    _synchronised(model, last),
                    torch.autocast("cpu", torch.bfloat16, enabled=capture.autocast),
                ):
                    value = loss(forward, count, generator) / capture.micro_batches
                    scaler.scale(value).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            scaler.step(optimizer)
            scaler.update()
    return monitor.estimate(), truth


def _problem(
    problem: Problem, capture: Capture
) -> tuple[nn.Module, Callable[[nn.Module, int, torch.Generator], Tensor], float]:
    """The module, its loss on so many new examples, and its noise scale."""
    if problem == "synthetic":
        torch.manual_seed(0)

        def mean(model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
            output: Tensor = model(gaussian_inputs(count, generator).to(capture.dtype))
            return output.float().mean()

        return mean_gradient_model().to(capture.dtype), mean, SYNTHETIC_NOISE_SCALE
    images, labels, state, truth = _digits()
    module = net()
    module.load_state_dict(state)

    def cross_entropy(model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(images), (count,), generator=generator)
        output: Tensor = model(images[chosen].to(capture.dtype))
        return functional.cross_entropy(output.float(), labels[chosen])

    return module.to(capture.dtype), cross_entropy, truth


@functools.cache
def _digits() -> tuple[Tensor, Tensor, dict[str, Tensor], float]:
    """The images, their labels, the weights at the fixed point, and the noise scale there."""
    images, labels = digits()[0].tensors
    trained = trained_net(images, labels)
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    trace, signal = brute_force(trained, images, labels)
    return images, labels, state, trace / signal


def _wrapped(module: nn.Module, capture: Capture) -> tuple[nn.Module, nn.Module]:
    """What attach() is given, and what is called."""
    if capture.wrap == "none":
        return module, module
    if capture.wrap in ("fsdp2", "hsdp-2x2"):
        shape, names = ((2, 2), ("replicate", "shard")) if capture.wrap == "hsdp-2x2" else ((2,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for child in module.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module, module
    if capture.wrap == "ddp-of-compile":
        torch._dynamo.reset()
        compiled = DistributedDataParallel(torch.compile(module, backend="aot_eager"))  # type: ignore[arg-type]  # a module
        return compiled, compiled
    model = DistributedDataParallel(module)
    if capture.wrap == "compile-of-ddp":
        torch._dynamo.reset()
        return model, torch.compile(model, backend="aot_eager")  # type: ignore[return-value]  # a module
    return model, model


@contextlib.contextmanager
def _synchronised(model: nn.Module, last: bool) -> Any:
    """Reduce in the last micro-batch of a step alone."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    yield


def alone(name: str, problem: Problem) -> tuple[Estimate, float]:
    """The same in this very process, for captures of one."""
    from pathlib import Path

    assert not dist.is_initialized()
    return measure(Rank(0, 1, Path()), name=name, problem=problem)
