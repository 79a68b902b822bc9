"""What measuring costs a training step, beside plain DDP and beside other packages.

    python -m tests.benchmarks.hook_overhead --help

Every variant trains a model of its own in the same two processes; their steps are interleaved, round by
round, so that what else the machine does meets all of them alike. What counts is the ratio of a variant's
median step time to plain DDP's of the same run; "plain again" shows how far chance takes it.

"comm hook alone" is what a hook costs that only averages, as it is on steps that are not measured.
"tensor hooks" is the other way to capture DDP, for the comparison: see TensorHooks.
"""

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.hooks.norms import square_norm

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "build" / "peers"
PEER_PACKAGES = ("k-diffusion", "fairscale", "adaptdl", "portpicker")

Step = Callable[[int], None]


class Transformer(nn.Module):
    """A small language model, 3.3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 512)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(ids)))
        return logits


def mlp() -> nn.Module:
    """10.5 million parameters."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)
    )


def mlp_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(64, 1024)).square().mean()
    return loss


def transformer_loss(model: nn.Module) -> Tensor:
    ids = torch.randint(0, 512, (4, 64))
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "mlp": (mlp, mlp_loss),
    "transformer": (Transformer, transformer_loss),
}


def trainer(
    kind: str, *, micro_batches: int, prepare: Callable[[DistributedDataParallel, Any], Any] | None
) -> tuple[Step, Any]:
    """A function that does one optimizer step, and what `prepare` made."""
    make, loss = MODELS[kind]
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = prepare(model, optimizer) if prepare else None
    after: Callable[[], None] = getattr(kept, "after_step", lambda: None)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for index in range(micro_batches):
            with contextlib.nullcontext() if index == micro_batches - 1 else model.no_sync():
                (loss(model) / micro_batches).backward()  # type: ignore[no-untyped-call]  # torch has no types
        optimizer.step()
        after()

    return step, kept


def attached(**arguments: Any) -> Callable[[DistributedDataParallel, Any], Any]:
    return lambda model, optimizer: noisescale.attach(
        model, optimizer, report_to=lambda report: None, **arguments
    )


def comm_hook_alone(model: DistributedDataParallel, optimizer: Any) -> None:
    """A hook in Python that does what DDP does without one."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model.register_comm_hook(None, allreduce_hook)


class TensorHooks:
    """Captures DDP by hooks on the parameters that are there in measured steps only.

    The comm-hook slot stays free, and steps that are not measured cost nothing. Each parameter's gradient is
    read as backward makes it, and what all ranks' come to after DDP has waited for its buckets: by a callback
    of the engine's that puts itself behind DDP's own. There is no more here than is needed to see what it
    costs, for it cannot take the place of the comm hook. In Join a rank that ran out of data has no backward
    pass, so nothing would enter the packet's all-reduce there, and the others would wait for it. And a rank's
    own gradient over several micro-batches is never in one place before DDP averages it.

    Args:
        every: Every how many steps one is measured.
    """

    def __init__(self, model: DistributedDataParallel, *, every: int) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._every = every
        self._step = 0
        self._handles: list[Any] = []
        self._squares: list[Tensor] = []
        self._sent: list[Any] = []
        self._group = dist.new_group()
        self._synchronises = lambda: model.require_backward_grad_sync
        model.register_forward_pre_hook(self._begin)

    def after_step(self) -> None:
        """An optimizer step is done."""
        self._step += 1

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if self._step % self._every == 0 and not self._handles:
            self._handles = [p.register_hook(self._local) for p in self._parameters]  # type: ignore[no-untyped-call]  # torch has no types for it

    def _local(self, gradient: Tensor) -> None:
        self._squares.append(square_norm(gradient))
        if len(self._squares) % len(self._parameters) == 1 and self._synchronises():
            torch.autograd.Variable._execution_engine.queue_callback(self._requeue)  # type: ignore[attr-defined]  # not in its types

    def _requeue(self) -> None:
        # DDP's own callback was queued after this one, and before the one that is queued now.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]  # likewise

    def _finish(self) -> None:
        mean = torch.stack([square_norm(p.grad) for p in self._parameters if p.grad is not None]).sum()
        packet = torch.stack([torch.stack(self._squares).sum(), mean])
        self._sent = [*self._sent[-3:], (packet, dist.all_reduce(packet, group=self._group, async_op=True))]
        for handle in self._handles:
            handle.remove()
        self._handles, self._squares = [], []


def tensor_hooks(every: int) -> Callable[[DistributedDataParallel, Any], Any]:
    return lambda model, optimizer: TensorHooks(model, every=every)


def k_diffusion(model: DistributedDataParallel, optimizer: Any) -> Any:
    """Its DDPGradientStatsHook, asked after every step as its own training script does."""
    gns = _peer_module("k_diffusion/gns.py")
    hook, scale = gns.DDPGradientStatsHook(model), gns.GradientNoiseScale()

    class Asked:
        def after_step(self) -> None:
            scale.update(*hook.get_stats(), 64, 128)

    return Asked()


def fairscale(model: DistributedDataParallel, optimizer: Any) -> Any:
    """Its AdaScale around the optimizer, whose gain is read after every step."""
    sys.path.append(str(PEERS))
    from fairscale.optim import AdaScale  # type: ignore[import-not-found]  # installed on demand

    scaled = AdaScale(optimizer, world_size=dist.get_world_size())

    class Asked:
        def after_step(self) -> None:
            scaled.gain()

    return Asked()


def adaptdl(model: DistributedDataParallel, optimizer: Any) -> Any:
    """Its GradientNoiseScale, on the same DDP model."""
    sys.path.append(str(PEERS))
    from adaptdl.torch.gradient_noise_scale import (  # type: ignore[import-not-found]  # installed on demand
        GradientNoiseScale,
    )

    return GradientNoiseScale(model, optimizer)


def _peer_module(path: str) -> Any:
    """One file of a peer, without all that the package around it imports."""
    spec = importlib.util.spec_from_file_location("peer", PEERS / path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variants(kind: str, *, accumulation: int, peers: bool) -> Iterator[tuple[str, int, Any]]:
    """Name, micro-batches and preparation of each."""
    unit = {"batch_unit": "tokens"} if kind == "transformer" else {}
    for micro_batches in (1, accumulation):
        tag = "" if micro_batches == 1 else f", {micro_batches} micro-batches"
        yield f"plain{tag}", micro_batches, None
        yield f"plain again{tag}", micro_batches, None
        yield f"comm hook alone{tag}", micro_batches, comm_hook_alone
        yield f"every=1{tag}", micro_batches, attached(every=1, **unit)
        yield f"every=10{tag}", micro_batches, attached(every=10, **unit)
        yield f'every="auto"{tag}', micro_batches, attached(every="auto", **unit)
        yield f"tensor hooks, every=1{tag}", micro_batches, tensor_hooks(1)
        yield f"tensor hooks, every=10{tag}", micro_batches, tensor_hooks(10)
        yield (
            f"micro-batch samples, every=1{tag}",
            micro_batches,
            attached(every=1, samples="micro_batch", **unit),
        )
        yield (
            f'micro-batch samples, every="auto"{tag}',
            micro_batches,
            attached(every="auto", samples="micro_batch", **unit),
        )
    if peers:
        yield "k-diffusion DDPGradientStatsHook", 1, k_diffusion
        yield "fairscale AdaScale", 1, fairscale
        yield "adaptdl GradientNoiseScale", 1, adaptdl


def measure(kind: str, args: argparse.Namespace) -> list[list[str]]:
    """Rows of the table, on rank 0."""
    made: dict[str, tuple[Step, int, Any]] = {}
    failed: dict[str, str] = {}
    for name, micro_batches, prepare in variants(kind, accumulation=args.accumulation, peers=args.peers):
        if args.only and name not in ("plain", *args.only):
            continue
        try:
            step, kept = trainer(kind, micro_batches=micro_batches, prepare=prepare)
            for number in range(args.warm_up):
                step(number)
        except Exception as error:
            if prepare not in (k_diffusion, fairscale, adaptdl):
                raise
            failed[name] = f"{type(error).__name__}: {error}"[:70]
            continue
        made[name] = (step, micro_batches, kept)
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(args.rounds):
        for name, (step, _, _) in made.items():
            for index in range(args.steps):
                started = time.perf_counter()
                step(number * args.steps + index)
                times[name].append(time.perf_counter() - started)
    plain = {
        micro_batches: statistics.median(times[name])
        for name, (_, micro_batches, _) in made.items()
        if name.startswith("plain") and "again" not in name
    }
    rows = []
    for name, (_, micro_batches, kept) in made.items():
        median = statistics.median(times[name])
        every = kept.estimate().every if isinstance(kept, noisescale.Monitor) else None
        rows.append([name, f"{1000 * median:.2f}", f"{median / plain[micro_batches]:.3f}", str(every or "")])
    rows += [[name, "did not run", "", why] for name, why in failed.items()]
    return rows


def rank(index: int, meeting: str, args: argparse.Namespace) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=index, world_size=args.ranks)
    for kind in args.models:
        torch.manual_seed(1 + index)
        rows = measure(kind, args)
        if index == 0:
            show(kind, rows)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)


def show(kind: str, rows: list[list[str]]) -> None:
    count = sum(parameter.numel() for parameter in MODELS[kind][0]().parameters())
    print(f"\n{kind}, {count / 1e6:.1f} million parameters\n")  # noqa: T201  its output
    print("| variant | median step, ms | ratio to plain DDP | every |")  # noqa: T201  its output
    print("|---|---:|---:|---:|")  # noqa: T201  its output
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)  # noqa: T201  its output


def install_peers() -> None:
    """Into a folder of their own, without what they depend on."""
    PEERS.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(PEERS),
            *PEER_PACKAGES,
        ],
        check=True,
    )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20, help="of all variants (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="a round and variant (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=25, help="steps not counted (default: %(default)s)")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="of these variants, and plain (default: all)"
    )
    parser.add_argument("--peers", action="store_true", help="install other packages and measure them too")
    args = parser.parse_args()
    if args.peers:
        install_peers()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, args=(str(Path(folder) / "store"), args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
