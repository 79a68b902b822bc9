"""Measuring never changes, stops or slows training, whatever goes wrong with it."""

import contextlib
import copy
import io
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import noisescale
from noisescale.errors import UnsupportedModelError
from noisescale.hooks.measuring import DEPTH
from noisescale.hooks.overhead import MAX_EVERY, MIN_TIMINGS, WARM_UP_PASSES
from noisescale.wire import BlocksReport
from tests.hooks.ranks import Rank, Ranks, RanksFailedError
from tests.hooks.training import Reports, loss_of, same_bits, small_net, train

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "many-buckets": {"ddp": {"bucket_cap_mb": 0.001}},
    "bucket-views": {"ddp": {"gradient_as_bucket_view": True}},
    "zeroed-bucket-views": {"ddp": {"gradient_as_bucket_view": True}, "set_to_none": False},
    "zeroed-gradients": {"set_to_none": False},
    "static-graph": {"ddp": {"static_graph": True}},
    "find-unused": {"ddp": {"find_unused_parameters": True}},
    "accumulation": {"micro_batches": 3},
}


def both_ways(rank: Rank, **job: Any) -> bool:
    """Whether 50 steps end in the same weights, bit for bit, with the hook and without."""
    plain = train(steps=50, measured=False, **job)
    measured = train(steps=50, **job)
    return same_bits(plain.weights, measured.weights)


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_bitwise_those_of_plain_ddp(two_ranks: Ranks, three_ranks: Ranks, mode: str) -> None:
    """After 50 steps no weight differs in a bit, on 2 and 3 ranks (1/3 is no power of 2)."""
    for ranks in (two_ranks, three_ranks):
        assert all(ranks.run(both_ways, **MODES[mode])), ranks.world_size


def seldom_job(rank: Rank) -> bool:
    plain = train(steps=50, measured=False)
    seldom = train(steps=50, attach={"every": 7})
    return same_bits(plain.weights, seldom.weights)


def test_unmeasured_steps_are_untouched_too(three_ranks: Ranks) -> None:
    """With every=7, the steps between are those of plain DDP as well."""
    assert all(three_ranks.run(seldom_job))


WAITS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_linalg_check_errors",
}
"""What the profiler calls the host's waits for the device: a number is read, or a size depends on one."""

WATCHED: dict[str, dict[str, Any]] = {
    "default": {},
    "groups": {"groups": ["first*", "last*"]},
    "micro-batch samples": {"samples": "micro_batch"},
    "geometries": {"geometry": ["adam", "sign", "spectral"], "geometry_every": 1},
    "loss scale": {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=256.0)},
}


def names_of_steps(rank: Rank, *, attach: dict[str, Any] | None) -> Counter[str]:
    """What the profiler saw in 8 steps of 2 micro-batches, after the first ones."""
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = (attach or {}).get("grad_scaler")
    monitor = None
    if attach is not None:
        monitor = noisescale.attach(model, optimizer, every=1, report_to=Reports(), **attach)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for index in range(2):
            with contextlib.nullcontext() if index else model.no_sync():
                loss = loss_of(model, rank.rank, 2 * number + index, 8) / 2
                (scaler.scale(loss) if scaler is not None else loss).backward()
        optimizer.step()

    for number in range(5):
        step(number)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(5, 13):
            step(number)
    if monitor is not None:
        monitor.close()
        if rank.rank == 0:
            assert monitor.estimate().measured_steps == 13
    return Counter(event.name for event in profiler.events())


def waits_of_measuring(rank: Rank, *, mode: str) -> dict[str, int]:
    """Waits in measured steps beyond those of the same steps without: Adam itself has some."""
    plain = names_of_steps(rank, attach=None)
    measured = names_of_steps(rank, attach=WATCHED[mode])
    assert measured["aten::linalg_vector_norm"] > plain["aten::linalg_vector_norm"]  # it saw the measuring
    return {name: measured[name] - plain[name] for name in WAITS if measured[name] != plain[name]}


@pytest.mark.parametrize("mode", WATCHED)
def test_no_step_waits_for_the_device(two_ranks: Ranks, mode: str) -> None:
    """The profiler sees no item(), and nothing else that makes the host wait, in 8 measured steps."""
    assert two_ranks.run(waits_of_measuring, mode=mode) == [{}, {}]


def test_the_watch_for_waits_sees_them() -> None:
    """The names that the test above looks for are those that waiting has."""
    numbers = torch.eye(2)
    waiting: dict[str, Callable[[], object]] = {
        "aten::_local_scalar_dense": lambda: numbers[0, 0].item(),
        "aten::item": lambda: float(numbers[0, 0]),
        "aten::is_nonzero": lambda: bool(numbers[0, 0] > 0),
        "aten::equal": lambda: torch.equal(numbers, numbers),
        "aten::nonzero": lambda: numbers[numbers > 0],
        "aten::masked_select": lambda: numbers.masked_select(numbers > 0),
        "aten::_linalg_check_errors": lambda: torch.linalg.cholesky(numbers),
    }
    assert waiting.keys() == WAITS
    for name, wait in waiting.items():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            wait()
        assert name in [event.name for event in profiler.events()]


def bad_inner_job(rank: Rank, *, kind: str) -> str:
    def returns_none(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return None  # type: ignore[return-value]  # the mistake that is being made

    def returns_tensor(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return bucket.buffer()  # type: ignore[return-value]  # the mistake that is being made

    hook = {"none": returns_none, "tensor": returns_tensor}[kind]
    with pytest.raises(UnsupportedModelError, match="must return") as raised:
        train(steps=1, attach={"inner_hook": hook})
    return str(raised.value)


@pytest.mark.parametrize("kind", ["none", "tensor"])
def test_inner_hook_without_a_future_is_told(kind: str) -> None:
    """An inner hook that returns None would crash the interpreter; the error says what it returned."""
    # Ranks of its own: DDP's reducer is left in the middle of a pass.
    ranks = Ranks(2)
    try:
        for message in ranks.run(bad_inner_job, kind=kind):
            assert {"none": "NoneType", "tensor": "Tensor"}[kind] in message
            assert "torch.futures.Future" in message
    finally:
        ranks.stop()


def different_every_job(rank: Rank) -> tuple[bool, int | None]:
    """Each rank asks for another `every`, as clocks of their own would make them."""
    plain = train(steps=40, measured=False)
    job = train(steps=40, attach={"every": 3 if rank.rank == 0 else 1})
    assert job.monitor is not None
    return same_bits(plain.weights, job.weights), job.reports.sums()[2] if rank.rank == 0 else None


def test_rank_0_decides_which_steps_are_measured(two_ranks: Ranks) -> None:
    """Ranks that wish for different steps do not wait for each other for ever: rank 0's wish holds."""
    answers = two_ranks.run(different_every_job)
    assert answers == [(True, 14), (True, None)]


def changing_every_job(rank: Rank) -> tuple[bool, int]:
    """Rank 0's meter changes its mind in mid-run."""
    plain = train(steps=60, measured=False)
    monitors: list[Any] = []

    def change(model: nn.Module, step: int) -> None:
        if rank.rank == 0 and step == 20:
            monitors[0]._capture._measuring.meter.every = 5

    real = noisescale.attach

    def remembering(*arguments: Any, **named: Any) -> Any:
        monitors.append(real(*arguments, **named))
        return monitors[-1]

    noisescale.attach = remembering
    try:
        job = train(steps=60, before_step=change)
    finally:
        noisescale.attach = real
    return same_bits(plain.weights, job.weights), job.reports.sums()[2] if rank.rank == 0 else 0


def test_a_changed_every_takes_effect_alike(two_ranks: Ranks) -> None:
    """What rank 0 decides in mid-run travels in the packets, and no rank waits for another."""
    (same, steps), (other_same, _) = two_ranks.run(changing_every_job)
    assert same
    assert other_same
    assert 20 + 40 // 5 <= steps <= 20 + 8 + 40 // 5


def auto_job(rank: Rank) -> tuple[bool, int, int, int | None, float | None]:
    """every="auto" with a share of step time that nothing could keep to."""
    plain = train(steps=40, measured=False)
    job = train(steps=40, attach={"every": "auto", "max_overhead": 1e-9})
    assert job.monitor is not None
    capture: Any = job.monitor._capture
    info = job.reports[-1].run if rank.rank == 0 else None
    told = (info.every, info.measured_share) if info is not None else (None, None)
    steps = job.reports.sums()[2] if rank.rank == 0 else 0
    return same_bits(plain.weights, job.weights), capture._measuring.every, steps, *told


def test_auto_settles_alike_and_says_on_what(two_ranks: Ranks) -> None:
    """every="auto" becomes as rare as it may on both ranks alike, and rank 0 reports it with its share."""
    (same, every, steps, said, share), (other_same, other_every, _, _, _) = two_ranks.run(auto_job)
    assert same
    assert other_same
    assert every == other_every == said == MAX_EVERY
    # All steps until enough were timed, and those under way until the others knew.
    assert WARM_UP_PASSES + MIN_TIMINGS <= steps <= WARM_UP_PASSES + MIN_TIMINGS + 2 * DEPTH
    assert share is not None
    assert share > 0


def copies_job(rank: Rank) -> list[bool]:
    """Pickle, deepcopy and torch.save of the module in mid-run; then a step of the copy and on."""
    plain = train(steps=10, measured=False)
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reports = Reports()
    copies: list[DistributedDataParallel] = []
    with noisescale.attach(model, optimizer, every=1, report_to=reports):
        for step in range(10):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step, 8).backward()
            optimizer.step()
            if step == 4:
                copies.append(copy.deepcopy(model))
                copies.append(pickle.loads(pickle.dumps(model)))  # noqa: S301  our own
                buffer = io.BytesIO()
                torch.save(model, buffer)
                buffer.seek(0)
                copies.append(torch.load(buffer, weights_only=False))
    trained = []
    for copied in copies:
        own = torch.optim.SGD(copied.parameters(), lr=0.05)
        loss_of(copied, rank.rank, 5, 8).backward()
        own.step()
        noisescale.attach(copied, own, every=1).close()
        trained.append(same_bits(copied.module.state_dict(), copies[0].module.state_dict()))
    state = {name: value.detach() for name, value in model.module.state_dict().items()}
    steps = reports.sums()[2] if rank.rank == 0 else 10
    return [same_bits(plain.weights, state), steps == 10, *trained]


def test_model_can_be_pickled_copied_and_saved(two_ranks: Ranks) -> None:
    """pickle, deepcopy and torch.save of the DDP module work; copies train, and can be attached to."""
    assert two_ranks.run(copies_job) == [[True] * 5] * 2


def detached_job(rank: Rank) -> tuple[bool, int, int]:
    """Detach after 5 steps, train on, attach again for the last 5."""
    plain = train(steps=15, measured=False)
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first, second = Reports(), Reports()
    hooks_before = len(model._forward_pre_hooks)
    monitor = noisescale.attach(model, optimizer, every=1, report_to=first)
    for step in range(15):
        if step == 5:
            monitor.detach()
            assert len(model._forward_pre_hooks) == hooks_before
            assert not optimizer._optimizer_step_post_hooks
        optimizer.zero_grad()
        loss_of(model, rank.rank, step, 8).backward()
        optimizer.step()
    state = {name: value.detach() for name, value in model.module.state_dict().items()}
    return same_bits(plain.weights, state), first.sums()[2] if rank.rank == 0 else 5, len(second)


def test_detached_model_trains_as_without(two_ranks: Ranks) -> None:
    """After detach() the model and the optimizer have no hooks of ours but the inert comm hook."""
    assert two_ranks.run(detached_job) == [(True, 5, 0)] * 2


def one_rank_leaves_job(rank: Rank) -> bool:
    """Rank 1 alone closes its monitor in mid-run, with every=1."""
    plain = train(steps=30, measured=False)
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = noisescale.attach(model, optimizer, every=1)
    for step in range(30):
        if step == 10 and rank.rank == 1:
            monitor.close()
        optimizer.zero_grad()
        loss_of(model, rank.rank, step, 8).backward()
        optimizer.step()
    monitor.close()
    return same_bits(plain.weights, dict(model.module.state_dict()))


def test_one_rank_may_leave(two_ranks: Ranks) -> None:
    """A rank whose monitor is closed takes part until all know; nobody waits."""
    assert two_ranks.run(one_rank_leaves_job) == [True, True]


def sink_job(rank: Rank, *, kind: str) -> tuple[bool, float]:
    """Reports go to something that raises, hangs, or is not there."""
    plain = train(steps=40, measured=False)
    release = threading.Event()

    def raises(report: BlocksReport) -> None:
        raise RuntimeError("injected")

    def hangs(report: BlocksReport) -> None:
        release.wait(30)

    destination: Any = {"raises": raises, "hangs": hangs, "nobody": "http://127.0.0.1:9"}[kind]
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = noisescale.attach(model, optimizer, every=1, report_to=destination)
    for step in range(40):
        optimizer.zero_grad()
        loss_of(model, rank.rank, step, 8).backward()
        optimizer.step()
    started = time.monotonic()
    monitor.close(timeout_s=0.5)
    took = time.monotonic() - started
    release.set()
    return same_bits(plain.weights, dict(model.module.state_dict())), took


@pytest.mark.parametrize("kind", ["raises", "hangs", "nobody"])
def test_trouble_with_reports_does_not_reach_training(two_ranks: Ranks, kind: str) -> None:
    """A destination that raises, hangs or is not there: all steps are done, and close() keeps its time."""
    for same, took in two_ranks.run(sink_job, kind=kind):
        assert same
        assert took < 20


def test_rank_that_dies_is_noticed() -> None:
    """The tests' own ranks: one that dies or raises is an error that says so."""
    ranks = Ranks(2)
    with pytest.raises(RanksFailedError, match="rank 1: died with exit code 7"):
        ranks.run(die)
    assert ranks.run(lives_on) == [0, 1]
    ranks.stop()


def die(rank: Rank) -> None:
    """Only rank 1."""
    if rank.rank == 1:
        os._exit(7)


def lives_on(rank: Rank) -> int:
    """The rank."""
    return rank.rank


JOB = """
import sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
import noisescale

def work(rank, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(rank, out)
    dist.destroy_process_group()

def train(rank, out):
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with noisescale.attach(model, optimizer, every=1, report_to=f"file:{out}", run="started"):
        for step in range(25):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()

if __name__ == "__main__":
    mp.start_processes(work, args=sys.argv[2:], nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_job_started_either_way(tmp_path: Path, method: str) -> None:
    """Ranks that are forked or spawned both report, and end by themselves."""
    script = tmp_path / "job.py"
    script.write_text(JOB, encoding="utf-8")
    out = tmp_path / "run.jsonl"
    command = [sys.executable, str(script), method, str(tmp_path / "store"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = BlocksReport.model_validate_json(out.read_text().splitlines()[-1])
    assert last.ended
    assert last.blocks[-1].last_step == 24
