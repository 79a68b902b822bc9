"""What measuring costs on a GPU: plain DDP against the hook, on one CUDA device.

    python -m tests.benchmarks.gpu_overhead
    python -m tests.benchmarks.gpu_overhead --device cpu --small

NCCL with one rank: the reduction is next to nothing, so that what measuring adds is seen at its largest.
Every variant trains a model of its own; their steps are interleaved, round by round, and timed by CUDA
events (on the CPU, with gloo, by the clock). Before that the square norms of some steps are compared with
float64's. One rank has no noise scale: what is compared is what goes into it.

A step's allocations are requests to PyTorch's caching allocator and, in brackets, to the device. Waits are
those of the host for the device that PyTorch itself can see (torch.cuda.set_sync_debug_mode).
"""

import argparse
import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.hooks import ddp
from noisescale.hooks.publish import Reading
from tests.benchmarks.tables import print_table

TOLERANCE = 1e-5
"""Of square norms, relative to float64's."""

CHECKED_STEPS = 6
"""Steps whose square norms are compared; 6, so that DDP has made its buckets anew."""


class Transformer(nn.Module):
    """A language model: at full size 125 million parameters, as GPT-2's smallest."""

    def __init__(self, *, small: bool) -> None:
        super().__init__()
        self.words, width, heads, layers = (512, 64, 2, 2) if small else (50304, 768, 12, 12)
        self.embedding = nn.Embedding(self.words, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, self.words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(ids)))
        return logits


@dataclass(frozen=True)
class Problem:
    """A model and what it is trained on.

    Attributes:
        make: On the CPU.
        loss: Of the model on a new batch, on its device.
        options: Of attach().
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.device], Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def problems(*, small: bool) -> dict[str, Problem]:
    """By name: many bf16 parameters with little to compute, and a transformer in bf16 autocast."""
    width, layers, rows = (128, 4, 32) if small else (8192, 15, 1024)
    sequences, length = (2, 32) if small else (8, 1024)

    def matrices() -> nn.Module:
        stack = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
        for layer in stack:
            # Each layer keeps the length of what goes through it, and of its gradient.
            nn.init.normal_(layer.weight, std=width**-0.5)
        return nn.Sequential(*stack)

    def matrices_loss(model: nn.Module, device: torch.device) -> Tensor:
        inputs = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        outputs: Tensor = model(inputs)
        return (outputs.float() - 1).square().mean()

    def words_loss(model: nn.Module, device: torch.device) -> Tensor:
        words = 512 if small else 50304
        ids = torch.randint(0, words, (sequences, length), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(ids)
        return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    return {
        "bf16 matrices": Problem(matrices, matrices_loss),
        "transformer": Problem(lambda: Transformer(small=small), words_loss, {"batch_unit": "tokens"}),
    }


VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "plain again": None,
    "every=1": {"every": 1},
    "every=10": {"every": 10},
    'every="auto"': {"every": "auto"},
    "micro-batch samples, every=1": {"every": 1, "samples": "micro_batch"},
}


class Trainer:
    """One variant: a model of its own, and its steps.

    Args:
        options: Of attach(); None is plain DDP.
    """

    def __init__(self, problem: Problem, options: dict[str, Any] | None, device: torch.device) -> None:
        torch.manual_seed(0)
        self._problem, self._device = problem, device
        self.model = DistributedDataParallel(problem.make().to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.monitor: noisescale.Monitor | None = None
        if options is not None:
            arguments = {**problem.options, **options}
            self.monitor = noisescale.attach(
                self.model, self.optimizer, report_to=lambda report: None, **arguments
            )

    def step(self) -> None:
        """One optimizer step of one micro-batch."""
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        """Of one new micro-batch."""
        self._problem.loss(self.model, self._device).backward()  # type: ignore[no-untyped-call]  # torch has no types for it


class Kept(list[Reading]):
    """Takes the place of what would make a noise scale of readings, and keeps them."""

    def take(self, reading: Reading) -> None:
        """One measured step."""
        self.append(reading)

    def refuse(self, why: str) -> None:
        """Raises: what is measured here is right."""
        raise RuntimeError(why)


def checked(problem: Problem, options: dict[str, Any], device: torch.device) -> float:
    """The largest relative error of the square norms that a variant takes, against float64's.

    Of two micro-batches, so that the samples and what they come to are not the same.
    """
    trainer = Trainer(problem, {**options, "every": 1}, device)
    kept = Kept()
    capture: Any = trainer.monitor._capture if trainer.monitor is not None else None
    capture._measuring._consumer = kept
    by_micro_batch = options.get("samples") == "micro_batch"
    wanted = []
    for _ in range(CHECKED_STEPS):
        trainer.optimizer.zero_grad()
        with trainer.model.no_sync():
            trainer.backward()
        first = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
        second: dict[int, Tensor] = {}
        handles = [p.register_hook(_keeping(second, index)) for index, p in enumerate(_trained(trainer))]  # type: ignore[no-untyped-call]  # torch has no types for it
        trainer.backward()
        for handle in handles:
            handle.remove()
        mean = square([p.grad for p in _trained(trainer) if p.grad is not None])
        # The gradients are summed over micro-batches: what is reduced is at once the rank's one sample.
        samples = square(first) + square([second[index] for index in sorted(second)])
        wanted.append((samples if by_micro_batch else mean, mean))
        trainer.optimizer.step()
    if trainer.monitor is not None:
        trainer.monitor.close()
    # A sample's mean gradient is twice its part in the sum of two, and the packet has twice its square.
    factor = 2.0 if by_micro_batch else 1.0
    return largest_error(kept, wanted, factor=factor)


def _trained(trainer: Trainer) -> list[nn.Parameter]:
    return list(trainer.model.parameters())


def _keeping(found: dict[int, Tensor], index: int) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        found[index] = gradient.clone()

    return hook


def square(gradients: Sequence[Tensor]) -> float:
    """|g|^2 in float64, in pieces, for a copy of all of it may not fit."""
    pieces = (piece for gradient in gradients for piece in gradient.detach().flatten().split(2**24))
    return sum(float(piece.double().square().sum()) for piece in pieces)


def largest_error(
    readings: Sequence[Reading], wanted: Sequence[tuple[float, float]], *, factor: float
) -> float:
    """Relative, over the steps' samples and means.

    Raises:
        RuntimeError: Steps are missing.
    """
    if len(readings) != len(wanted):
        raise RuntimeError(f"{len(readings)} of {len(wanted)} steps were measured")
    errors = []
    for reading, (samples, mean) in zip(readings, wanted, strict=True):
        errors.append(abs(reading.packet.local_squares[0] / (factor * samples) - 1))
        errors.append(abs(reading.global_squares[0] / mean - 1))
    return max(errors)


class Clock:
    """Times steps: by CUDA events, read once the device is done with them all, or by the clock.

    Attributes:
        times_ms: Of all steps so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[Any, Any]] = []
        self.times_ms: list[float] = []

    def time(self, step: Callable[[], None]) -> None:
        """One step."""
        if self._cuda:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            step()
            after.record()
            self._events.append((before, after))
            return
        started = time.perf_counter()
        step()
        self.times_ms.append(1000 * (time.perf_counter() - started))

    def settle(self) -> None:
        """Wait for the device and read the events."""
        if self._cuda:
            torch.cuda.synchronize()
            self.times_ms += [before.elapsed_time(after) for before, after in self._events]
            self._events = []


@dataclass
class Memory:
    """Allocations and waits of a number of steps."""

    requests: int
    from_device: int
    waits: int


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Memory]:
    """What happens meanwhile on a CUDA device."""
    found = Memory(0, 0, 0)
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    found.requests = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    found.from_device = after["num_device_alloc"] - before["num_device_alloc"]
    found.waits = len([warning for warning in caught if "synchroniz" in str(warning.message)])


def measure(problem: Problem, args: argparse.Namespace, device: torch.device) -> tuple[list[list[str]], bool]:
    """Rows of the table, and whether all square norms are right."""
    errors = {
        name: checked(problem, options, device)
        for name, options in VARIANTS.items()
        if name in args.variants and options is not None
    }
    trainers = {name: Trainer(problem, VARIANTS[name], device) for name in args.variants}
    for trainer in trainers.values():
        for _ in range(args.warm_up):
            trainer.step()
    clocks = {name: Clock(device) for name in trainers}
    for _ in range(args.rounds):
        for name, trainer in trainers.items():
            for _ in range(args.steps):
                clocks[name].time(trainer.step)
            clocks[name].settle()
    rows, plain_ms = [], statistics.median(clocks["plain"].times_ms)
    for name, trainer in trainers.items():
        with watched(device) as memory:
            for _ in range(args.steps):
                trainer.step()
        median_ms = statistics.median(clocks[name].times_ms)
        every = trainer.monitor.estimate().every if trainer.monitor is not None else None
        used = ["", ""]
        if device.type == "cuda":
            per_step = [count / args.steps for count in (memory.requests, memory.from_device, memory.waits)]
            used = [f"{per_step[0]:.1f} ({per_step[1]:.1f})", f"{per_step[2]:.1f}"]
        error = f"{errors[name]:.1e}" if name in errors else ""
        timing = [f"{median_ms:.3f}", f"{median_ms / plain_ms:.4f}", str(every or "")]
        rows.append([name, *timing, *used, error])
    for trainer in trainers.values():
        if trainer.monitor is not None:
            trainer.monitor.close()
    return rows, all(error <= TOLERANCE for error in errors.values())


HEAD = [
    "variant",
    "median step, ms",
    "ratio to plain DDP",
    "every",
    "allocations a step (from the device)",
    "waits a step",
    "largest error",
]


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--small", action="store_true", help="models that a CPU trains in milliseconds")
    made.add_argument("--models", nargs="+", choices=list(problems(small=True)), help="(default: all)")
    made.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        default=list(VARIANTS),
        help="the fewer, the less memory (default: all)",
    )
    made.add_argument("--rounds", type=int, default=10, help="of all variants (default: %(default)s)")
    made.add_argument("--steps", type=int, default=10, help="a round and variant (default: %(default)s)")
    made.add_argument("--warm-up", type=int, default=20, help="steps not counted (default: %(default)s)")
    return made


def main() -> None:
    """Parse, run, print; exits with 1 if a square norm is not float64's."""
    commands = parser()
    args = commands.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        commands.error("there is no CUDA device; use --device cpu --small")
    if "plain" not in args.variants:
        args.variants.insert(0, "plain")
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ddp.MIN_RANKS = 1
    right = True
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    for kind, problem in problems(small=args.small).items():
        if args.models and kind not in args.models:
            continue
        rows, good = measure(problem, args, device)
        count = sum(parameter.numel() for parameter in problem.make().parameters())
        print(f"\n{kind}, {count / 1e6:.1f} million parameters, {backend} on {name}\n")  # noqa: T201  its output
        print_table(HEAD, rows)
        right = right and good
    dist.destroy_process_group()
    if not right:
        sys.exit(f"a square norm is off by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
