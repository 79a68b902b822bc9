"""An example to copy: a plain DistributedDataParallel job with the noise-scale monitor attached.

Trains a small convolutional net on scikit-learn's bundled handwritten digits:

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m noisescale.hooks.digits

The two lines that noisescale needs are marked. With `--report-to http://localhost:8000` the
noise scale goes to a server; without, it is printed at the end.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it ships no types
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import noisescale

TRAINING_IMAGES = 1437
"""Of 1,797; the rest are for testing."""

PIXEL_NOISE = 0.2
"""Standard deviation of the noise added to pixels, which range from 0 to 1."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits, and measure the noise scale.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=8000, help="optimizer steps (default: %(default)s)")
    length.add_argument("--epochs", type=int, help="passes over the training images, instead of --steps")
    parser.add_argument("--local-batch-size", "--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--learning-rate", "--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-to", help="a noisescale server's URL, or file:PATH.jsonl")
    # Not --run: torchrun takes that as short for its own --run-path, wherever it stands.
    parser.add_argument("--run-name", default="digits", help="on the server")
    parser.add_argument("--every", type=int, default=1, help="measure every so many steps")
    return parser.parse_args(given)


def main() -> None:
    """One rank's whole job."""
    torch.set_num_threads(1)  # two ranks on two cores; more threads would fight over them
    dist.init_process_group("gloo")
    # The model lives in train() alone: gloo's threads, which hold its last gradients, then end
    # before the interpreter does. Where they do not, PyTorch aborts a job now and then at its exit.
    train(arguments())
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    """From the data to the advice."""
    torch.manual_seed(args.seed)
    training, test = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        training, seed=args.seed, drop_last=True
    )
    loader = DataLoader(training, batch_size=args.local_batch_size, sampler=sampler, drop_last=True)
    steps = args.steps if args.epochs is None else args.epochs * len(loader)

    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=args.momentum)
    monitor = noisescale.attach(  # noisescale: watch this model
        model,
        optimizer,
        report_to=args.report_to,
        run=args.run_name,
        every=args.every,  # "auto" keeps the cost under 1%; a net this small can afford every step
        max_micro_batch_size=512,
    )

    torch.manual_seed(args.seed + 1 + dist.get_rank())  # every rank distorts its images differently
    for step, (images, labels) in enumerate(batches(loader, sampler, steps=steps)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(distorted(images)), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        optimizer.step()
        if (step + 1) % 500 == 0 and dist.get_rank() == 0:
            say(f"step {step + 1}: loss {loss.item():.3f}, test accuracy {accuracy(model, test):.1%}")

    if dist.get_rank() == 0 and steps > 0:
        say(monitor.recommend().explanation)
    monitor.close()  # noisescale: send what is left


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, 1 x 8 x 8 with pixels from 0 to 1, and their labels."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    training, test = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[test], labels[test])


def net() -> nn.Module:
    """A small convolutional net, 9,930 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def batches(
    loader: "DataLoader[tuple[Tensor, ...]]", sampler: "DistributedSampler[tuple[Tensor, ...]]", *, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """So many batches, epoch after epoch, each in another order."""
    done, epoch = 0, 0
    while done < steps:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            if done == steps:
                return
            yield images, labels
            done += 1
        epoch += 1


def distorted(images: Tensor) -> Tensor:
    """Each image shifted by up to a pixel either way, with pixel noise: 1,437 images last longer so."""
    count = len(images)
    padded = functional.pad(images, (1, 1, 1, 1))
    shifts = torch.randint(0, 3, (count, 2))
    rows = shifts[:, 0, None] + torch.arange(8)
    columns = shifts[:, 1, None] + torch.arange(8)
    shifted = padded[torch.arange(count)[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
    return shifted[:, None] + PIXEL_NOISE * torch.randn(images.shape)


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Share of the test images that the model gets right."""
    images, labels = test.tensors
    with torch.no_grad():
        # The module inside: a forward of the wrapper would count as a training batch.
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return float((inner(images).argmax(dim=1) == labels).float().mean())


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)  # noqa: T201  a script's own output


if __name__ == "__main__":
    main()
