"""A monitor's state goes through a checkpoint and comes back bit for bit."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.errors import StateError
from tests.hooks.ranks import Rank, Ranks
from tests.hooks.training import Reports, loss_of, small_net


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Saved by torch and loaded with weights_only=True."""
    buffer = io.BytesIO()
    torch.save({"monitor": state}, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)["monitor"]
    return loaded


def resumed_job(rank: Rank, *, at: int) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """25 steps in one go, and the same 25 with a restart after step `at`; both estimates."""

    torch.manual_seed(3)
    start = nn.Linear(16, 4, bias=False).state_dict()

    def steps(first: int, last: int, states: list[dict[str, Any]]) -> tuple[dict[str, Any], Reports]:
        # One parameter: DDP orders several anew after its first step, and rounds differently then.
        model = DistributedDataParallel(nn.Linear(16, 4, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model.module.load_state_dict(states[0]["model"] if states else start)
        if states:
            optimizer.load_state_dict(states[0]["optimizer"])
        reports = Reports()
        monitor = noisescale.attach(model, optimizer, every=1, report_to=reports)
        if states:
            monitor.load_state_dict(through_a_file(states[0]["monitor"]))
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step, 8).backward()
            optimizer.step()
        states[:] = [
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "monitor": monitor.state_dict(),
            }
        ]
        estimate = monitor.estimate().model_dump()
        monitor.close()
        return estimate, reports

    whole, _ = steps(0, 25, [])
    states: list[dict[str, Any]] = []
    steps(0, at, states)
    resumed, reports = steps(at, 25, states)
    return whole, resumed, [block.first_step for report in reports for block in report.blocks]


@pytest.mark.parametrize("at", [1, 10, 14])
def test_resumed_in_the_middle_of_a_block(two_ranks: Ranks, at: int) -> None:
    """Saved in mid-block and loaded with weights_only=True, the estimate is the same to the last bit."""
    whole, resumed, first_steps = two_ranks.run(resumed_job, at=at)[0]
    assert whole["measured_steps"] == 25
    assert resumed == whole
    # What is sent again begins where the open block began: step numbers go on.
    assert first_steps[0] == at // 10 * 10


def save_job(rank: Rank, *, path: str) -> None:
    """10 steps on so many ranks; rank 0 saves."""
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with noisescale.attach(model, optimizer, every=1) as monitor:
        for step in range(10):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step, 8).backward()
            optimizer.step()
        state = monitor.state_dict()
    if rank.rank == 0:
        torch.save(state, path)


def load_job(rank: Rank, *, path: str) -> tuple[int, int]:
    """Goes on with it for 10 more steps."""
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with noisescale.attach(model, optimizer, every=1) as monitor:
        monitor.load_state_dict(torch.load(path, weights_only=True))
        before = sum(block.measured_steps for block in monitor._reporter.blocks()) if rank.rank == 0 else 10
        for step in range(10, 20):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step, 8).backward()
            optimizer.step()
    last = monitor._reporter.blocks()[-1].last_step if rank.rank == 0 else 19
    return before, last


def test_other_world_size_keeps_what_was_measured(
    two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    """tr(Sigma) and |G|^2 are per example: what 2 ranks measured, 3 go on with."""
    path = str(tmp_path / "monitor.pt")
    two_ranks.run(save_job, path=path)
    assert three_ranks.run(load_job, path=path) == [(10, 19)] * 3


def refused_states(rank: Rank) -> list[str]:
    """What load_state_dict() says of states that are none."""
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told = []
    with noisescale.attach(model, optimizer) as monitor:
        good = monitor.state_dict()
        wrong: list[Any] = [
            [1],
            {**good, "version": 99} if good else {"version": 99},
            {**good, "batch_unit": "tokens"} if good else {"version": 1, "batch_unit": "tokens"},
            {"version": 1, "batch_unit": "examples"},
        ]
        for state in wrong:
            try:
                monitor.load_state_dict(state)
                told.append("taken")
            except StateError as error:
                told.append(str(error))
        monitor.load_state_dict({})
    return told


def test_wrong_states_are_refused(two_ranks: Ranks) -> None:
    """A later version, another unit or no state at all: an error that says which."""
    told = two_ranks.run(refused_states)[0]
    assert "got a list" in told[0]
    assert "99" in told[1]
    assert "tokens" in told[2]
    assert "no state" in told[3]


def test_attempt_is_later_than_the_one_that_saved() -> None:
    """On a machine whose clock is an hour behind, a job that goes on still reports as a later attempt."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    with noisescale.attach(model, optimizer, samples="micro_batch", every=1, report_to=reports) as monitor:
        state = monitor.state_dict()
        state["attempt"] += 3_600_000
        monitor.load_state_dict(through_a_file(state))
        assert monitor.attempt == state["attempt"] + 1
    assert [report.attempt for report in reports] == [state["attempt"] + 1]
    # What an earlier noisescale saved does not say.
    del state["attempt"]
    again = noisescale.attach(model, optimizer, samples="micro_batch", every=1)
    before = again.attempt
    again.load_state_dict(state)
    assert again.attempt == before
    again.close()
