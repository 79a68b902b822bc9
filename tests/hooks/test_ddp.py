"""What the DDP hook measures is what float64 gradients of every rank say, in whatever job."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.hooks.ddp import NoiseScaleState, noise_scale_hook
from noisescale.hooks.measuring import UNSYNCED_ACCUMULATION
from tests.hooks.ranks import Rank, Ranks
from tests.hooks.training import (
    Job,
    Reports,
    gaussian_inputs,
    logged,
    loss_of,
    mean_gradient_model,
    reference_moments,
    small_net,
    sum_of,
    train,
)

GAUSSIAN_STEPS = 1200


def gaussian_job(rank: Rank, *, counts: Sequence[int], micro_batches: int = 1) -> tuple[float, int]:
    """Train on noise whose noise scale is 400; what was reported, on rank 0."""
    generator = torch.Generator().manual_seed(rank.rank)
    model = DistributedDataParallel(mean_gradient_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reports = Reports()
    with noisescale.attach(model, optimizer, every=1, report_to=reports):
        for _ in range(GAUSSIAN_STEPS // micro_batches):
            optimizer.zero_grad()
            for index in range(micro_batches):
                inputs = gaussian_inputs(counts[rank.rank], generator)
                with contextlib.nullcontext() if index == micro_batches - 1 else model.no_sync():
                    (model(inputs).mean() / micro_batches).backward()
            optimizer.step()
    if rank.rank != 0:
        return 0.0, 0
    assert reports.skipped() == 0
    return reports.noise_scale(), reports.sums()[2]


@pytest.mark.parametrize("counts", [(16, 16, 16, 16), (4, 8, 16, 36)], ids=["equal", "uneven"])
def test_noise_scale_of_known_noise(four_ranks: Ranks, counts: tuple[int, ...]) -> None:
    """Gaussian gradients of noise scale 400 are found to be that within 3%, whatever the ranks' sizes."""
    noise_scale, steps = four_ranks.run(gaussian_job, counts=counts)[0]
    assert steps == GAUSSIAN_STEPS
    assert noise_scale == pytest.approx(400, rel=0.03)


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_accumulation_does_not_change_the_noise_scale(two_ranks: Ranks, micro_batches: int) -> None:
    """Under no_sync() the sample is all micro-batches of a rank: the same 400 for 1, 2 and 8 of them."""
    counts = [64 // micro_batches] * 2
    noise_scale, _ = two_ranks.run(gaussian_job, counts=counts, micro_batches=micro_batches)[0]
    # At 8 micro-batches there are 150 steps, and one step tells tr(Sigma) to 2% and |G|^2 to 11%.
    assert noise_scale == pytest.approx(400, rel=0.03)


def against_reference(rank: Rank, **job: Any) -> None:
    """A job's sums equal those of the float64 gradients, step for step."""
    done = train(reference=True, **job)
    check_against_reference(rank, done)


def check_against_reference(rank: Rank, job: Job, *, rel: float = 1e-4) -> None:
    if rank.rank != 0:
        return
    trace, signal, steps = job.reports.sums()
    assert steps == len(job.references)
    wanted_trace, wanted_signal = sum_of(job.references)
    assert trace == pytest.approx(wanted_trace, rel=rel)
    assert signal == pytest.approx(wanted_signal, rel=rel, abs=rel * abs(wanted_trace))


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many-buckets": {"ddp": {"bucket_cap_mb": 0.001}},
    "one-bucket": {"ddp": {"bucket_cap_mb": 100}},
    "uneven": {"count": (3, 13)},
    "bucket-views": {"ddp": {"gradient_as_bucket_view": True}},
    "zeroed-gradients": {"set_to_none": False},
    "zeroed-bucket-views": {"ddp": {"gradient_as_bucket_view": True}, "set_to_none": False},
    "static-graph": {"ddp": {"static_graph": True, "bucket_cap_mb": 0.001}},
    "find-unused": {"ddp": {"find_unused_parameters": True}},
    "accumulation": {"micro_batches": 3},
    "uneven-accumulation": {"micro_batches": 2, "count": (5, 11)},
}


@pytest.mark.parametrize("name", JOBS)
def test_equals_the_reference(two_ranks: Ranks, name: str) -> None:
    """tr(Sigma) and |G|^2 are those of the ranks' float64 gradients, in every mode of DDP."""
    two_ranks.run(against_reference, **JOBS[name])


def first_steps(rank: Rank) -> list[tuple[float, float]]:
    """Ratio of measured to wanted tr(Sigma), of each of the first 4 steps alone, in many buckets."""
    model = DistributedDataParallel(small_net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    found: list[tuple[float, float]] = []
    with noisescale.attach(model, optimizer, every=1, report_to=reports) as monitor:
        for step in range(4):
            wanted = reference_moments(model, loss_of, step=step, sizes=[8, 8])
            optimizer.zero_grad()
            loss_of(model, rank.rank, step, 8).backward()
            optimizer.step()
            reports.clear()
            assert monitor.flush()
            if rank.rank == 0:
                trace, signal, steps = reports.sums()
                assert steps == 1
                found.append((trace / wanted.trace_covariance, signal / wanted.true_grad_sq_norm))
    return found


def test_bucket_rebuild_moves_nothing(two_ranks: Ranks) -> None:
    """DDP makes its buckets anew after the first step; the steps before and after are all right."""
    for ratios in two_ranks.run(first_steps)[0]:
        assert ratios == pytest.approx((1, 1), rel=1e-3)


def scaled_job(rank: Rank, *, scaler_known: bool) -> tuple[float, float]:
    """Train with gradients times a scale that changes mid-run; noise scale of it and without."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step_losses(model: nn.Module, own: int, step: int, count: int) -> Tensor:
        return scaler.scale(loss_of(model, own, step, count))

    def grow(model: nn.Module, step: int) -> None:
        scale = float(scaler.get_scale())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        if step % 3 == 2:
            scaler.update(scale * 2)

    known = {"grad_scaler": scaler} if scaler_known else {}
    scaled = train(loss=step_losses, before_step=grow, attach=known)
    plain = train()
    if rank.rank != 0:
        return 1.0, 1.0
    assert scaler.get_scale() > 1024
    return scaled.reports.sums()[0], plain.reports.sums()[0]


def test_loss_scale_is_taken_out(two_ranks: Ranks) -> None:
    """A GradScaler whose scale changes mid-run leaves tr(Sigma) as it is, to 1e-5."""
    scaled, plain = two_ranks.run(scaled_job, scaler_known=True)[0]
    assert scaled == pytest.approx(plain, rel=1e-5)


def tiny_loss(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    return 1e-5 * loss_of(model, rank, step, count)


def tiny_job(rank: Rank) -> tuple[float, float]:
    """Noise scale of the first step with the loss as it is and times 1e-5."""
    plain = train(steps=1)
    tiny = train(steps=1, loss=tiny_loss)
    if rank.rank != 0:
        return 1.0, 1.0
    return plain.reports.noise_scale(), tiny.reports.noise_scale()


def test_scale_of_the_loss_is_no_matter(two_ranks: Ranks) -> None:
    """The loss times 1e-5 has the same noise scale: nothing is floored at an absolute epsilon."""
    plain, tiny = two_ranks.run(tiny_job)[0]
    assert tiny == pytest.approx(plain, rel=1e-4)


def poisoned(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    """The loss; on rank 1 infinite at step 3 and NaN at step 5."""
    loss = loss_of(model, rank, step, count)
    if rank == 1 and step in (3, 5):
        loss = loss * (float("inf") if step == 3 else float("nan"))
    return loss


def forget_bad_gradients(model: nn.Module, step: int) -> None:
    if step in (3, 5):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


def poisoned_job(rank: Rank) -> tuple[int, int, float, int]:
    job = train(loss=poisoned, before_step=forget_bad_gradients)
    estimate = job.monitor.estimate() if job.monitor else None
    assert estimate is not None
    trace, _, steps = job.reports.sums() if rank.rank == 0 else (0.0, 0, 0)
    return steps, job.reports.skipped(), trace, estimate.skipped_steps


def test_non_finite_steps_are_skipped(two_ranks: Ranks) -> None:
    """An infinity or a NaN on one rank skips that step, counts it, and leaves the averages finite."""
    steps, skipped, trace, told = two_ranks.run(poisoned_job)[0]
    assert (steps, skipped, told) == (10, 2, 2)
    assert 0 < trace < float("inf")


def clip(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clipped_job(rank: Rank) -> None:
    check_against_reference(rank, train(reference=True, before_step=clip))


def test_clipping_is_no_matter(two_ranks: Ranks) -> None:
    """Gradients are measured before they are clipped."""
    two_ranks.run(clipped_job)


class OddNet(nn.Module):
    """Frozen, unused, shared, one- and two-element, empty and channels-last parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.one = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.two = nn.Parameter(torch.zeros(2))
        self.image = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = self.image(self.frozen(x).view(-1, 1, 4, 4)).flatten(1)
        hidden = torch.relu(self.tied(torch.relu(self.tied(image))))
        result: Tensor = self.last(hidden * self.one * self.scalar + self.two.sum())
        return result


def test_odd_parameters(two_ranks: Ranks) -> None:
    """Frozen, unused, shared, tiny and channels-last parameters are in or out as they should be."""
    two_ranks.run(against_reference, model=OddNet, ddp={"find_unused_parameters": True})


def odd_geometries(rank: Rank) -> list[dict[tuple[str, str], float]]:
    """tr(Sigma) of all geometries, by rank (from DDP's buckets) and by micro-batch (from autograd)."""
    found = []
    for samples in ("rank", "micro_batch"):
        attach = {"samples": samples, "geometry": ["sign", "spectral"], "geometry_every": 1}
        job = train(model=OddNet, ddp={"find_unused_parameters": True}, attach=attach)
        sums: dict[tuple[str, str], float] = {}
        for entry in (entry for report in job.reports for block in report.blocks for entry in block.sums):
            sums[entry.key] = sums.get(entry.key, 0.0) + entry.trace_covariance
        found.append(sums)
    return found


def test_odd_parameters_in_every_geometry(two_ranks: Ranks) -> None:
    """The same parameters, channels-last too, by rank and by micro-batch: with one each, the same samples."""
    by_rank, by_micro_batch = two_ranks.run(odd_geometries)[0]
    assert by_rank.keys() == {("total", name) for name in ("euclidean", "sign", "spectral")}
    assert by_micro_batch == pytest.approx(by_rank, rel=1e-4)


def same_data(model: nn.Module, rank: int, step: int, count: int) -> Tensor:
    return loss_of(model, 0, step, count)


def same_data_job(rank: Rank) -> tuple[list[str], int, float | None, float | None, float | None]:
    with logged() as lines:
        job = train(loss=same_data)
    assert job.monitor is not None
    estimate = job.monitor.estimate()
    steps = job.reports.sums()[2] if rank.rank == 0 else 0
    return lines, steps, estimate.noise_scale, estimate.lower, estimate.upper


def test_identical_data_is_told_and_not_believed(two_ranks: Ranks) -> None:
    """Ranks that read the same data: one warning that names the DistributedSampler, no noise scale."""
    lines, steps, noise_scale, lower, upper = two_ranks.run(same_data_job)[0]
    assert len([line for line in lines if "DistributedSampler" in line]) == 1
    assert (steps, noise_scale) == (0, None)
    assert (lower, upper) == (0, None)  # it may be anything


def half_job(rank: Rank, *, dtype: torch.dtype, factor: float) -> tuple[float, float]:
    """Noise scale of gradients of a half-precision model, and of the same values in float64."""
    counts = 8
    width = 512
    inputs = torch.randn(counts, width, generator=torch.Generator().manual_seed(rank.rank)) * factor + factor
    model = DistributedDataParallel(nn.Linear(width, 1, bias=False, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reports = Reports()
    with noisescale.attach(model, optimizer, every=1, report_to=reports):
        # A sum of the halved inputs keeps float16 gradients away from rounding to 0.
        model(inputs.to(dtype)).sum().backward()
        optimizer.step()
    own = inputs.to(dtype).double().sum(dim=0)
    both = [torch.empty_like(own), torch.empty_like(own)]
    dist.all_gather(both, own)
    spread = sum(float(g.square().sum()) for g in both) / 2 - float(((both[0] + both[1]) / 2).square().sum())
    return (reports.sums()[0] if rank.rank == 0 else 0.0), spread * 2 * counts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("factor", [100.0, 1e-4], ids=["large", "small"])
def test_half_precision_neither_overflows_nor_vanishes(
    two_ranks: Ranks, dtype: torch.dtype, factor: float
) -> None:
    """|g| in the thousands or at 1e-3 in half precision: the squares are taken in float32."""
    measured, wanted = two_ranks.run(half_job, dtype=dtype, factor=factor)[0]
    # The gradient itself is rounded to half precision, by a part in 256 for bf16.
    assert measured == pytest.approx(wanted, rel=0.02)


def rounded_hook_job(rank: Rank, *, hook: str) -> tuple[dict[str, str], float, float]:
    if hook == "fp16_compress_wrapper_hook":
        inner: Any = (dist.group.WORLD, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    else:
        inner = getattr(default_hooks, hook)
    job = train(reference=True, attach={"inner_hook": inner})
    if rank.rank != 0:
        return {}, 1.0, 1.0
    last = job.reports[-1].run
    assert last is not None
    return dict(last.labels), job.reports.sums()[0], sum_of(job.references)[0]


@pytest.mark.parametrize(
    ("hook", "rel"),
    [("fp16_compress_hook", 1e-3), ("bf16_compress_hook", 1e-2), ("fp16_compress_wrapper_hook", 1e-3)],
)
def test_rounding_inner_hook_is_measured_and_named(two_ranks: Ranks, hook: str, rel: float) -> None:
    """torch's compressing hooks run inside ours; the run says that its gradients are rounded."""
    labels, trace, wanted = two_ranks.run(rounded_hook_job, hook=hook)[0]
    assert labels["inner_hook"] == f"{hook} (rounds)"
    assert trace == pytest.approx(wanted, rel=rel)


def chatty_hook(state: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages, with collectives of its own on the model's group."""
    dist.all_reduce(torch.ones(1), group=state)
    buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(state))
    work = dist.all_reduce(buffer, group=state, async_op=True)
    dist.all_reduce(torch.ones(1), group=state)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


CHATTY: dict[str, dict[str, Any]] = {
    "plain": {},
    "find-unused": {"ddp": {"find_unused_parameters": True, "bucket_cap_mb": 0.001}},
    "accumulation": {"micro_batches": 2, "ddp": {"bucket_cap_mb": 0.001}},
}


@pytest.mark.parametrize("name", CHATTY)
def test_collectives_keep_their_order(two_ranks: Ranks, three_ranks: Ranks, name: str) -> None:
    """Our all-reduce, on a group of its own, never meets those of an inner hook, on 2 and 3 ranks."""
    job = CHATTY[name] | {"attach": {"inner_hook": chatty_hook}}
    two_ranks.run(against_reference, **job)
    three_ranks.run(against_reference, **job)


def uneven_epoch(rank: Rank, *, divide: bool, inner: bool) -> tuple[int, float, float]:
    """Rank r has 4 + 3 r batches, under Join; measured and wanted tr(Sigma) on rank 0."""
    batches = 4 + 3 * rank.rank
    model = DistributedDataParallel(small_net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    inner_hook = chatty_hook if inner else None
    monitor = noisescale.attach(model, optimizer, every=1, report_to=reports, inner_hook=inner_hook)
    weights: list[dict[str, Tensor]] = []
    with Join([model], divide_by_initial_world_size=divide):
        for step in range(batches):
            weights.append({n: v.detach().clone() for n, v in model.module.state_dict().items()})
            optimizer.zero_grad()
            loss_of(model, rank.rank, step, 8).backward()
            optimizer.step()
    monitor.close()
    if rank.rank != 0:
        return 0, 1.0, 1.0
    # All ranks had a batch in the first 4 steps; those are taken again, all on this rank.
    alone = small_net()
    wanted = 0.0
    for step in range(4):
        alone.load_state_dict(weights[step])
        gradients = []
        for other in range(rank.world_size):
            alone.zero_grad()
            loss_of(alone, other, step, 8).backward()
            pieces = [p.grad.double().reshape(-1) for p in alone.parameters() if p.grad is not None]
            gradients.append(torch.cat(pieces))
        stacked = torch.stack(gradients)
        spread = stacked.square().sum(dim=1).mean() - stacked.mean(dim=0).square().sum()
        wanted += float(spread) * 8 * rank.world_size / (rank.world_size - 1)
    first = [b for r in reports for b in r.blocks]
    assert first[0].first_step == 0
    steps = sum(b.measured_steps for b in first)
    return steps, sum(b.sums[0].trace_covariance for b in first if b.sums), wanted


@pytest.mark.parametrize("inner", [False, True], ids=["own-reduction", "inner-hook"])
def test_exhausted_ranks_are_left_out(two_ranks: Ranks, inner: bool) -> None:
    """In Join's uneven epoch on 2 ranks, the steps with one rank left have no spread and are not counted."""
    steps, trace, wanted = two_ranks.run(uneven_epoch, divide=True, inner=inner)[0]
    assert steps == 4
    assert trace == pytest.approx(wanted, rel=1e-3)


def test_exhausted_ranks_change_the_weights_of_the_rest(three_ranks: Ranks) -> None:
    """On 3 ranks the steps with two ranks left still count, whichever number DDP divides by."""
    measured = [three_ranks.run(uneven_epoch, divide=divide, inner=False)[0] for divide in (True, False)]
    # 4 steps of 3 ranks and 3 of 2 ranks.
    assert [steps for steps, _, _ in measured] == [7, 7]
    for _, trace, wanted in measured:
        assert trace / 7 == pytest.approx(wanted / 4, rel=0.5)


def subgroup_job(rank: Rank) -> None:
    """Two models at a time: ranks 0 and 2 train one, ranks 1 and 3 another."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[rank.rank % 2]
    job = train(reference=True, group=own, steps=6 + 2 * (rank.rank % 2))
    check_against_reference(Rank(dist.get_rank(own), 2, rank.folder), job)
    assert job.monitor is not None
    if dist.get_rank(own) == 0:
        info = job.reports[-1].run
        assert info is not None
        assert info.dp_world_size == 2


def test_model_of_a_subgroup(four_ranks: Ranks) -> None:
    """A model on 2 of 4 ranks is measured by those 2, which need not keep step with the others."""
    four_ranks.run(subgroup_job)


def unsynced_job(rank: Rank, *, partly: bool, samples: str) -> tuple[list[str], int]:
    """Accumulates 2 micro-batches; synchronises in both of them."""
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    attach: dict[str, Any] = {"every": 1, "report_to": reports, "samples": samples}
    with logged() as lines, noisescale.attach(model, optimizer, **attach):
        for step in range(12):
            optimizer.zero_grad()
            loss = loss_of(model, rank.rank, 2 * step, 8)
            # Around backward alone, no_sync() does nothing: DDP decides in the forward.
            with model.no_sync() if partly else contextlib.nullcontext():
                loss.backward()
            loss_of(model, rank.rank, 2 * step + 1, 8).backward()
            optimizer.step()
    return lines, reports.sums()[2] if rank.rank == 0 else 0


@pytest.mark.parametrize("partly", [False, True], ids=["no-no_sync", "no_sync-around-backward-only"])
@pytest.mark.parametrize("samples", ["rank", "micro_batch"])
def test_unsynced_accumulation_is_refused(two_ranks: Ranks, partly: bool, samples: str) -> None:
    """Accumulating without no_sync(), or with it in the wrong place: one error that says what to write."""
    lines, _ = two_ranks.run(unsynced_job, partly=partly, samples=samples)[0]
    assert [line for line in lines if line.startswith("ERROR")] == [f"ERROR {UNSYNCED_ACCUMULATION}"]


def pytorch_idiom_job(rank: Rank) -> tuple[float, float]:
    """register_comm_hook(state, hook) beside attach()."""
    found = []
    for by_hand in (True, False):
        model = DistributedDataParallel(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        reports = Reports()
        if by_hand:
            state = NoiseScaleState(model, optimizer, every=1, report_to=reports)
            model.register_comm_hook(state, noise_scale_hook)
            monitor = state.monitor
        else:
            monitor = noisescale.attach(model, optimizer, every=1, report_to=reports)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step, 8).backward()
            optimizer.step()
        monitor.close()
        found.append(reports.noise_scale() if rank.rank == 0 else 0.0)
    return found[0], found[1]


def test_pytorch_idiom_is_the_same(two_ranks: Ranks) -> None:
    """model.register_comm_hook(state, noise_scale_hook) measures what attach() does."""
    by_hand, attached = two_ranks.run(pytorch_idiom_job)[0]
    assert by_hand == attached


def estimate_job(rank: Rank) -> dict[str, Any]:
    job = train(steps=25, attach={"every": 2, "tuned": {"global_batch_size": 16, "learning_rate": 0.05}})
    assert job.monitor is not None
    estimate = job.monitor.estimate().model_dump()
    if rank.rank == 0:
        estimate["advice"] = job.monitor.recommend(target_dp_world_size=8).explanation
        info = job.reports[-1].run
        assert info is not None
        estimate["info"] = info.model_dump()
    else:
        with pytest.raises(noisescale.NoiseScaleError, match="rank 0"):
            job.monitor.recommend()
        assert job.monitor.flush()
        assert job.monitor.state_dict() == {}
    return estimate


def test_monitor_answers_without_a_server(two_ranks: Ranks) -> None:
    """estimate() and recommend() know the run on rank 0; other ranks' monitors do nothing."""
    first, second = two_ranks.run(estimate_job)
    assert first["measured_steps"] == 13
    assert (first["every"], first["global_batch_size"], first["batch_unit"]) == (2, 16, "examples")
    assert "noise scale" in first["advice"]
    info = first["info"]
    assert (info["dp_world_size"], info["micro_batch_size"], info["accumulation_steps"]) == (2, 8, 1)
    assert (info["optimizer"], info["momentum"]) == ("sgd", 0.9)
    assert second["measured_steps"] == 0
