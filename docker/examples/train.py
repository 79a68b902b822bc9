"""A job to copy the two noisescale lines from: DDP on every rank that torchrun starts, on CPU or GPU."""

import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import noisescale

STEPS = int(os.environ.get("STEPS", "2000"))


def read_token() -> str | None:
    """The write token from the file that the secret is mounted as; None where the server wants none."""
    path = os.environ.get("NOISESCALE_TOKEN_FILE")
    return Path(path).read_text().strip() if path else None


def main() -> None:
    """Train a small net on noise with a signal in it."""
    cuda = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(1 + torch.distributed.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(64, 10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    target = torch.linspace(-1, 1, 640, device=device).view(64, 10)
    with noisescale.attach(
        model,
        optimizer,
        report_to=os.environ.get("NOISESCALE_REPORT_TO"),
        run=os.environ.get("NOISESCALE_RUN", "example"),
        token=read_token(),
    ):
        for _ in range(STEPS):
            inputs = torch.randn(32, 64, device=device)
            loss = (model(inputs) - inputs @ target - torch.randn(32, 10, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
