"""Whatever raises inside measuring, on whichever rank: told once, measuring stops, training goes on."""

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.hooks import reporter as reporter_module
from tests.hooks.faults import Fault
from tests.hooks.ranks import Rank, Ranks
from tests.hooks.training import Reports, logged, loss_of, same_bits, small_net

STEPS = 16
FAULT_AT = 5
"""The step from which on the function raises."""


def ddp_training(
    rank: Rank, *, attach: dict[str, Any] | None, fault: Fault | None = None
) -> tuple[dict[str, Tensor], Reports]:
    """2 micro-batches a step under DDP in many buckets, by Adam; the weights it ends with."""
    model = DistributedDataParallel(small_net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    reports, monitor = Reports(), None
    if attach is not None:
        monitor = noisescale.attach(model, optimizer, every=1, report_to=reports, **attach)
    for step in range(STEPS):
        if fault is not None and step == FAULT_AT:
            fault.on = True
        optimizer.zero_grad()
        for index in range(2):
            with contextlib.nullcontext() if index else model.no_sync():
                (loss_of(model, rank.rank, 2 * step + index, 8) / 2).backward()
        optimizer.step()
    if monitor is not None:
        monitor.close()
    return {name: value.detach().clone() for name, value in model.module.state_dict().items()}, reports


def faulty_job(
    rank: Rank, *, where: str, at_rank: int, attach: dict[str, Any]
) -> tuple[bool, list[str], int, int]:
    """Same weights, errors told, how often the fault was met, and steps reported; of one rank."""
    plain, _ = ddp_training(rank, attach=None)
    fault = Fault()
    broken = fault.inside(where) if rank.rank == at_rank else contextlib.nullcontext()
    with logged() as lines, broken:
        weights, reports = ddp_training(rank, attach=attach, fault=fault)
    errors = [line for line in lines if line.startswith(("ERROR", "WARNING"))]
    return same_bits(plain, weights), errors, fault.raised, reports.sums()[2] if rank.rank == 0 else 0


GEOMETRIES = {"geometry": ["adam", "sign", "spectral"], "geometry_every": 1}

ON_ANY_RANK = (
    "forwards.count_by",
    "measuring.pack",
    "options.Options.unscale",
    "publish.Slot.local_total",
    "groups.square_norm",
    "groups.LayerGroups.sums",
    "geometry.sampled.preconditioners",
    "geometry.sampled.weighted_square",
    "geometry.sampled.half_terms",
    "geometry.spectral.add_products",
    "geometry.sampled.GeometryStep.ready",
    "geometry.sampled.GeometryStep.local_numbers",
)
ON_RANK_0 = (
    "ddp.learning_rate_of",
    "publish.Slot._own_numbers",
    "geometry.sampled.GeometryStep.mean",
    "geometry.sign.finish",
    "geometry.spectral.finish",
    "steps.step_moments",
    "reporter.RankZeroReporter.take",
)
BY_RANK = ("ddp.half_sign", "ddp.NoiseScaleState._apart")
BY_MICRO_BATCH = (
    "micro_batches.MicroBatchSquares.watch",
    "micro_batches.MicroBatchSquares.take",
    "micro_batches.square_norm",
    "micro_batches.half_sign",
)


def told_once(answers: list[tuple[bool, list[str], int, int]], *, at_rank: int) -> None:
    """What every case demands of what the ranks answer."""
    assert [same for same, _, _, _ in answers] == [True, True]
    assert answers[at_rank][2] > 0, "the fault was never met"
    own = [line for line in answers[at_rank][1] if "failed on rank" in line]
    assert own == [f"ERROR noisescale failed on rank {at_rank} and stops measuring; training is not affected"]
    if at_rank == 1:
        assert answers[0][1] == ["ERROR noisescale has stopped measuring: it failed on 1 rank(s)"]
    assert 0 < answers[0][3] < STEPS - 4


@pytest.mark.parametrize("at_rank", [0, 1])
@pytest.mark.parametrize("where", [*ON_ANY_RANK, *BY_RANK])
def test_any_fault_on_one_rank_stops_measuring_on_all(two_ranks: Ranks, where: str, at_rank: int) -> None:
    """Every step of measuring, with every geometry, raises on one rank: nobody waits, same bits."""
    attach = {**GEOMETRIES, "groups": ["first*", "last*"]}
    told_once(two_ranks.run(faulty_job, where=where, at_rank=at_rank, attach=attach), at_rank=at_rank)


@pytest.mark.parametrize("where", ON_RANK_0)
def test_faults_of_the_rank_that_reports(two_ranks: Ranks, where: str) -> None:
    """What only rank 0 does may raise as well; the other rank does not wait for it."""
    attach = {**GEOMETRIES, "groups": ["first*", "last*"]}
    told_once(two_ranks.run(faulty_job, where=where, at_rank=0, attach=attach), at_rank=0)


@pytest.mark.parametrize("at_rank", [0, 1])
@pytest.mark.parametrize("where", BY_MICRO_BATCH)
def test_faults_in_taking_micro_batches(two_ranks: Ranks, where: str, at_rank: int) -> None:
    """The same where every micro-batch is a sample."""
    attach = {**GEOMETRIES, "samples": "micro_batch"}
    told_once(two_ranks.run(faulty_job, where=where, at_rank=at_rank, attach=attach), at_rank=at_rank)


def alone(attach: dict[str, Any], *, fault: Fault | None = None, step_s: float = 0.0) -> Reports:
    """One process with 2 micro-batches a step."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    with noisescale.attach(model, optimizer, every=1, report_to=reports, samples="micro_batch", **attach):
        for step in range(STEPS):
            if fault is not None and step == FAULT_AT:
                fault.on = True
                time.sleep(step_s)
            optimizer.zero_grad()
            for index in range(2):
                (loss_of(model, 0, 2 * step + index, 8) / 2).backward()
            optimizer.step()
    return reports


@pytest.mark.parametrize(
    ("send_s", "heartbeat_s", "step_s", "said"),
    [
        (60.0, 0.0, 0.0, "failed on rank 0 and stops measuring"),  # as a step is taken in
        (0.05, 0.05, 0.5, "stops reporting"),  # by the pulse
        (60.0, 60.0, 0.0, "stops reporting"),  # as the job ends
    ],
    ids=["step", "pulse", "end"],
)
def test_reports_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, send_s: float, heartbeat_s: float, step_s: float, said: str
) -> None:
    """A report that cannot be made is told once, wherever it is met; nothing raises."""
    monkeypatch.setattr(reporter_module, "SEND_INTERVAL_S", send_s)
    monkeypatch.setattr(reporter_module, "HEARTBEAT_S", heartbeat_s)
    fault = Fault()
    with logged() as lines, fault.inside("reporter.BlocksReport"):
        reports = alone({}, fault=fault, step_s=step_s)
    assert fault.raised > 0
    assert [said in line for line in lines if line.startswith("ERROR")] == [True]
    assert not any(report.ended for report in reports)
