"""A job that torchrun starts again goes on as a later attempt of the same run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services import Server, running_server

JOB = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import noisescale

url, run, folder, failing = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "fails"
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
checkpoint = folder / "checkpoint.pt"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
# One parameter: DDP orders several anew after its first step, and rounds differently then.
model = DistributedDataParallel(torch.nn.Linear(16, 4, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
monitor = noisescale.attach(model, optimizer, every=1, report_to=url, run=run)
start = 0
if not first:
    saved = torch.load(checkpoint, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    monitor.load_state_dict(saved["monitor"])
    start = saved["step"]
for step in range(start, 40):
    if failing and first and step == 25:
        monitor.flush()
        dist.barrier()
        if rank == 1:
            os._exit(3)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 16, generator=generator)
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :4]).square().mean().backward()
    optimizer.step()
    if step == 17:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        state["monitor"] = monitor.state_dict()
        if rank == 0:
            torch.save(state, checkpoint)
monitor.close()
dist.destroy_process_group()
"""


def train(server: Server, folder: Path, run: str, *, fails: bool) -> dict[str, Any]:
    """Under torchrun with 2 ranks and 1 restart; what the server knows of the run at the end."""
    folder.mkdir()
    script = folder / "job.py"
    script.write_text(JOB, encoding="utf-8")
    elastic = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    job = [str(script), server.url, run, str(folder), "fails" if fails else "lives"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, *job]
    # Else PyTorch 2.13's gloo finds in the second start's store the addresses of the first.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("exitcode: 3" in done.stderr) or not fails
    found: dict[str, Any] = json.loads(server.get(f"/v1/runs/{run}").body)
    return found


def test_restart_is_a_later_attempt_that_takes_the_place_of_what_it_repeats(tmp_path: Path) -> None:
    """Rank 1 dies at step 25, and the job goes on from step 18: the run is as if nothing had happened."""
    with running_server(tmp_path / "server") as server:
        whole = train(server, tmp_path / "whole", "whole", fails=False)
        restarted = train(server, tmp_path / "restarted", "restarted", fails=True)
    assert len(whole["attempts"]) == 1
    first, second = restarted["attempts"]
    assert second > first
    assert restarted["state"] == "ended"
    for field in ("steps", "examples", "skipped_steps", "dropped_blocks", "last_step"):
        assert restarted[field] == whole[field], field
    assert whole["steps"] == 40
    assert whole["examples"] == 40 * 2 * 8
    (one,), (other,) = whole["estimates"], restarted["estimates"]
    assert other["measured_steps"] == one["measured_steps"] == 40
    for field in ("noise_scale", "trace_covariance", "true_grad_sq_norm"):
        assert other[field] == pytest.approx(one[field], rel=1e-9), field
