"""Micro-batches as samples, in DDP and in one process: the same noise scale as from whole ranks."""

import contextlib
import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import noisescale
from noisescale.errors import InvalidInputError
from noisescale.hooks.monitor import Monitor
from noisescale.hooks.stepwise import NO_ACCUMULATION
from noisescale.moments import SampleGeometry, StepMoments, step_moments
from tests.hooks.ranks import Rank, Ranks
from tests.hooks.training import (
    Reports,
    SmallNet,
    batch_of,
    gaussian_inputs,
    logged,
    loss_of,
    mean_gradient_model,
    same_bits,
    small_net,
    sum_of,
)

MICRO_BATCHES = 4


def gradients_of(model: nn.Module, batches: Sequence[tuple[int, int, int]]) -> Tensor:
    """One row per micro-batch (rank, number, count): its float64 mean gradient."""
    rows = []
    for rank, number, count in batches:
        model.zero_grad()
        loss_of(model, rank, number, count).backward()
        pieces = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        rows.append(torch.cat([piece.double().reshape(-1) for piece in pieces]))
    model.zero_grad()
    return torch.stack(rows)


def moments_of(gradients: Tensor, *, counts: Sequence[int], weights: Sequence[float]) -> StepMoments:
    w = torch.tensor(weights, dtype=torch.float64)
    return step_moments(
        local_sq=float((gradients.square().sum(dim=1) * w).sum()),
        global_sq=float((gradients * w[:, None]).sum(dim=0).square().sum()),
        geometry=SampleGeometry.of(counts=counts, weights=weights),
    )


def accumulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    step: int,
    counts: Sequence[int],
    total: int | None = None,
    world_size: int = 1,
) -> None:
    """Backward of one step's micro-batches; with `total`, each a sum over examples divided by it."""
    optimizer.zero_grad()
    for index, count in enumerate(counts):
        last = index == len(counts) - 1
        ddp = isinstance(model, DistributedDataParallel)
        with model.no_sync() if ddp and not last else contextlib.nullcontext():
            loss = loss_of(model, rank, step * len(counts) + index, count)
            scale = 1 / len(counts) if total is None else world_size * count / total
            (loss * scale).backward()


def ddp_job(
    rank: Rank, *, counts: Sequence[Sequence[int]], reduction: str | None, by: str
) -> tuple[tuple[float, float], tuple[float, float], bool]:
    """8 steps; measured and wanted sums, and whether the weights are those of training without."""
    own = counts[rank.rank]
    everyone = [(r, c) for r, row in enumerate(counts) for c in row]
    total = sum(c for _, c in everyone) if reduction == "global_mean" else None
    results: list[dict[str, Tensor]] = []
    reports = Reports()
    wanted: list[StepMoments] = []
    for measured in (False, True):
        model = DistributedDataParallel(small_net(), bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        monitor: Monitor | None = None
        if measured:
            monitor = noisescale.attach(
                model,
                optimizer,
                every=1,
                report_to=reports,
                samples=by,  # type: ignore[arg-type]  # a parameter of the test
                loss_reduction=reduction,  # type: ignore[arg-type]  # likewise
            )
        for step in range(8):
            if measured and rank.rank == 0:
                alone = copy.deepcopy(model.module)
                batches = [
                    (r, step * len(row) + i, c) for r, row in enumerate(counts) for i, c in enumerate(row)
                ]
                gradients = gradients_of(alone, batches)
                sizes = [c for _, _, c in batches]
                weights = (
                    [c / sum(sizes) for c in sizes]
                    if total
                    else [1 / len(counts) / len(counts[r]) for r, _, _ in batches]
                )
                if by == "rank":
                    gradients, sizes, weights = by_rank(gradients, batches, weights, counts)
                wanted.append(moments_of(gradients, counts=sizes, weights=weights))
            accumulate(
                model,
                optimizer,
                rank=rank.rank,
                step=step,
                counts=own,
                total=total,
                world_size=rank.world_size,
            )
            optimizer.step()
        if monitor is not None:
            monitor.close()
        results.append({n: v.detach().clone() for n, v in model.module.state_dict().items()})
    if rank.rank != 0:
        return (1.0, 1.0), (1.0, 1.0), same_bits(*results)
    assert reports.sums()[2] == 8
    return reports.sums()[:2], sum_of(wanted), same_bits(*results)


def by_rank(
    gradients: Tensor,
    batches: Sequence[tuple[int, int, int]],
    weights: Sequence[float],
    counts: Sequence[Sequence[int]],
) -> tuple[Tensor, list[int], list[float]]:
    """The same samples, put together by rank (for counts that are equal within a rank)."""
    rows, sizes, sums = [], [], []
    for rank, row in enumerate(counts):
        chosen = [i for i, batch in enumerate(batches) if batch[0] == rank]
        w = torch.tensor([weights[i] for i in chosen], dtype=torch.float64)
        rows.append((gradients[chosen] * w[:, None]).sum(dim=0) / w.sum())
        sizes.append(sum(row))
        sums.append(float(w.sum()))
    return torch.stack(rows), sizes, sums


CASES: dict[str, dict[str, Any]] = {
    "one-each": {"counts": [[8], [8]], "reduction": None, "by": "micro_batch"},
    "four-each": {"counts": [[8] * 4, [8] * 4], "reduction": None, "by": "micro_batch"},
    "uneven": {"counts": [[3, 9, 4], [16, 5, 8]], "reduction": "mean", "by": "micro_batch"},
    "unlike-ranks": {"counts": [[4, 4], [16, 16]], "reduction": None, "by": "micro_batch"},
    "tokens": {"counts": [[3, 9, 4], [16, 5, 8]], "reduction": "global_mean", "by": "micro_batch"},
    "tokens-by-rank": {"counts": [[3, 3], [16, 16]], "reduction": "global_mean", "by": "rank"},
    "tokens-one-each": {"counts": [[5], [11]], "reduction": "global_mean", "by": "rank"},
}


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_equal_the_reference(two_ranks: Ranks, name: str) -> None:
    """Each micro-batch of each rank a sample, mean or token-weighted, is what float64 gradients say."""
    for measured, wanted, same in two_ranks.run(ddp_job, **CASES[name]):
        assert measured[0] == pytest.approx(wanted[0], rel=1e-4)
        assert measured[1] == pytest.approx(wanted[1], rel=1e-4, abs=1e-4 * abs(wanted[0]))
        assert same


def solo(
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    *,
    counts: Sequence[int] = (8,) * MICRO_BATCHES,
    steps: int = 8,
    **attach: Any,
) -> tuple[Reports, list[StepMoments], dict[str, Tensor]]:
    """One process; what was reported, what it should be, the weights at the end."""
    model = prepare(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reports = Reports()
    total = sum(counts) if attach.get("loss_reduction") == "global_mean" else None
    monitor = noisescale.attach(model, optimizer, every=1, report_to=reports, samples="micro_batch", **attach)
    wanted = []
    for step in range(steps):
        alone = small_net()
        alone.load_state_dict({n.removeprefix("_orig_mod."): v for n, v in model.state_dict().items()})
        batches = [(0, step * len(counts) + i, c) for i, c in enumerate(counts)]
        weights = [c / sum(counts) for c in counts] if total else [1 / len(counts)] * len(counts)
        if len(counts) > 1:
            wanted.append(moments_of(gradients_of(alone, batches), counts=counts, weights=weights))
        accumulate(model, optimizer, rank=0, step=step, counts=counts, total=total)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    monitor.close()
    return reports, wanted, {n.removeprefix("_orig_mod."): v for n, v in model.state_dict().items()}


def agrees(reports: Reports, wanted: Sequence[StepMoments]) -> None:
    trace, signal, steps = reports.sums()
    assert steps == len(wanted)
    assert trace == pytest.approx(sum_of(wanted)[0], rel=1e-4)
    assert signal == pytest.approx(sum_of(wanted)[1], rel=1e-4, abs=1e-4 * abs(trace))


@pytest.mark.parametrize("counts", [(8, 8), (8,) * 8, (3, 9, 20)])
@pytest.mark.parametrize("reduction", [None, "global_mean"])
def test_one_process(counts: tuple[int, ...], reduction: str | None) -> None:
    """No DDP at all: micro-batches of one process, clipped afterwards, are right."""
    reports, wanted, _ = solo(counts=counts, loss_reduction=reduction)
    agrees(reports, wanted)
    info = reports[-1].run
    assert (info.dp_world_size, info.samples, info.accumulation_steps) == (1, "micro_batch", len(counts))


def plain(prepare: Callable[[nn.Module], nn.Module] = lambda model: model) -> dict[str, Tensor]:
    """The weights after the same training without the monitor."""
    model = prepare(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        accumulate(model, optimizer, rank=0, step=step, counts=(8,) * MICRO_BATCHES)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return dict(model.state_dict())


def test_one_process_trains_as_without() -> None:
    """The weights are bitwise those of training without the monitor."""
    assert same_bits(plain(), solo()[2])


def test_one_process_of_known_noise() -> None:
    """Gaussian gradients of noise scale 400 are found to be that within 3%, from 8 micro-batches of 8."""
    generator = torch.Generator().manual_seed(0)
    model = mean_gradient_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reports = Reports()
    with noisescale.attach(model, optimizer, every=1, report_to=reports, samples="micro_batch"):
        for _ in range(1200):
            optimizer.zero_grad()
            for _ in range(8):
                (model(gaussian_inputs(8, generator)).mean() / 8).backward()
            optimizer.step()
    assert reports.noise_scale() == pytest.approx(400, rel=0.03)


def test_compiled_module() -> None:
    """torch.compile of the module changes nothing of what is measured."""
    reports, wanted, _ = solo(lambda model: torch.compile(model, backend="aot_eager"))
    agrees(reports, wanted)


class Checkpointed(SmallNet):
    """SmallNet, its doubly used weight under activation checkpointing."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        again = checkpoint(self.middle, 2 * hidden, use_reentrant=self.reentrant)
        hidden = torch.tanh(self.middle(hidden)) + torch.tanh(again)
        result: Tensor = self.last(hidden * self.scale)
        return result


def checkpointed(model: nn.Module, *, reentrant: bool) -> nn.Module:
    made = Checkpointed()
    made.reentrant = reentrant
    made.load_state_dict(model.state_dict())
    return made


def test_checkpointing() -> None:
    """Non-reentrant activation checkpointing of a shared weight is measured right."""
    reports, wanted, _ = solo(lambda model: checkpointed(model, reentrant=False))
    agrees(reports, wanted)


def test_reentrant_checkpointing_of_a_shared_weight_is_refused() -> None:
    """Its gradient comes in two pieces, whose squares do not add up: one error, and training goes on."""
    with logged() as lines:
        reports, _, weights = solo(lambda model: checkpointed(model, reentrant=True))
    assert reports.sums()[2] == 0
    assert len([line for line in lines if line.startswith("ERROR")]) == 1
    assert same_bits(weights, plain(lambda model: checkpointed(model, reentrant=True)))


def test_gradient_penalty_is_not_counted_twice() -> None:
    """torch.autograd.grad() of the parameters calls their hooks and accumulates nothing."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for penalty in (False, True):
        reports = Reports()
        with noisescale.attach(model, optimizer, every=1, report_to=reports, samples="micro_batch"):
            for index in range(3):
                optimizer.zero_grad()
                for micro_batch in range(2):
                    loss = loss_of(model, 0, 2 * index + micro_batch, 8)
                    if penalty:
                        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
                        loss = loss + 0 * sum(g.square().sum() for g in grads)
                    loss.backward()
                optimizer.step()
        found.append(reports.sums())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_one_micro_batch_has_no_spread() -> None:
    """Without accumulation nothing is measured; one error says what to do."""
    with logged() as lines:
        reports, _, _ = solo(counts=(8,), steps=25)
    assert reports.sums()[2] == 0
    assert lines.count(f"ERROR {NO_ACCUMULATION}") == 1


def test_loss_scale_is_taken_out() -> None:
    """A GradScaler that changes its scale in mid-run leaves tr(Sigma) as it is, to 1e-5."""
    found = []
    for scaled in (False, True):
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
        reports = Reports()
        monitor = noisescale.attach(
            model, optimizer, every=1, report_to=reports, samples="micro_batch", grad_scaler=scaler
        )
        for step in range(8):
            optimizer.zero_grad()
            for index in range(2):
                scaler.scale(loss_of(model, 0, 2 * step + index, 8) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
        monitor.close()
        found.append(reports.sums())
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def overflowing_job(*, measured: bool) -> tuple[Reports, dict[str, Tensor]]:
    """A GradScaler that meets an infinite gradient in its fifth step, and does not let the optimizer step."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    reports = Reports()
    monitor = None
    if measured:
        monitor = noisescale.attach(
            model, optimizer, every=1, report_to=reports, samples="micro_batch", grad_scaler=scaler
        )
    for step in range(8):
        optimizer.zero_grad()
        for index in range(2):
            loss = loss_of(model, 0, 2 * step + index, 8) * (torch.inf if step == 4 else 1)
            scaler.scale(loss / 2).backward()
        scaler.step(optimizer)
        scaler.update()
    if monitor is not None:
        monitor.close()
    return reports, dict(model.state_dict())


def test_step_that_the_scaler_leaves_out() -> None:
    """An overflow, after which the optimizer does not step and the scale is halved, poisons no average."""
    reports, weights = overflowing_job(measured=True)
    trace, signal, steps = reports.sums()
    # The infinite gradients and those of the step after them end in one optimizer step.
    assert (steps, reports.skipped()) == (6, 1)
    assert math.isfinite(trace)
    assert math.isfinite(signal)
    assert same_bits(weights, overflowing_job(measured=False)[1])


def test_every_and_detach_leave_no_hooks() -> None:
    """Parameters have hooks in measured steps only, and none after detach(); nor has anything else."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = noisescale.attach(model, optimizer, every=3, samples="micro_batch")
    watched = []
    for step in range(6):
        accumulate(model, optimizer, rank=0, step=step, counts=(8, 8))
        watched.append(any(bool(p._backward_hooks) for p in model.parameters()))
        optimizer.step()
    assert watched == [True, False, False, True, False, False]
    accumulate(model, optimizer, rank=0, step=6, counts=(8, 8))
    monitor.detach()
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_copies_train_alone() -> None:
    """A pickled or deep-copied model in mid-step trains, and is measured by no one."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = noisescale.attach(model, optimizer, every=1, samples="micro_batch")
    loss_of(model, 0, 0, 8).backward()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  our own
        own = torch.optim.SGD(copied.parameters(), lr=0.05)
        for index in range(4):
            loss_of(copied, 0, index, 8).backward()
            own.step()
    assert monitor.estimate().measured_steps == 0
    monitor.close()


def test_groups_add_up_and_are_keyed_by_name() -> None:
    """Groups by pattern: each is the reference's for its parameters, and all of them make the total."""
    groups = {"norm": "norm.*", "middle": "middle.*", "rest": "*"}
    reports, wanted, _ = solo(groups=groups)
    agrees(reports, wanted)
    sums: dict[str, float] = {}
    for block in (block for report in reports for block in report.blocks):
        for entry in block.sums:
            sums[entry.group] = sums.get(entry.group, 0.0) + entry.trace_covariance
    assert set(sums) == {"total", *groups}
    assert sum(sums[group] for group in groups) == pytest.approx(sums["total"], rel=1e-9)
    model = small_net()
    rows = gradients_of(model, [(0, i, 8) for i in range(MICRO_BATCHES)])
    start = 0
    for name, parameter in model.named_parameters():
        if name.startswith("middle.weight"):
            break
        start += parameter.numel()
    part = rows[:, start : start + 32 * 32 + 32]
    first = moments_of(part, counts=[8] * MICRO_BATCHES, weights=[1 / MICRO_BATCHES] * MICRO_BATCHES)
    reports, _, _ = solo(groups=groups, steps=1)
    blocks = [block for report in reports for block in report.blocks]
    (middle,) = [entry for entry in blocks[0].sums if entry.group == "middle"]
    assert middle.trace_covariance == pytest.approx(first.trace_covariance, rel=1e-4)


def grouped_ddp_job(rank: Rank, *, groups: Any) -> tuple[dict[str, float], dict[str, float]]:
    """By layer group, tr(Sigma) measured over 4 steps (DDP rebuilds its buckets), and wanted."""
    model = DistributedDataParallel(small_net(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(
        [
            {"params": list(model.module.middle.parameters()), "name": "middle"},
            {"params": [p for n, p in model.module.named_parameters() if "middle" not in n], "name": "rest"},
        ],
        lr=0.05,
    )
    reports = Reports()
    wanted = {"middle": 0.0, "rest": 0.0}
    with noisescale.attach(model, optimizer, every=1, report_to=reports, groups=groups):
        for step in range(4):
            alone = copy.deepcopy(model.module)
            rows = gradients_of(alone, [(r, step, 8) for r in range(rank.world_size)])
            names = [n for n, p in alone.named_parameters() for _ in range(p.numel())]
            for group in wanted:
                chosen = torch.tensor([("middle" in n) == (group == "middle") for n in names])
                part = moments_of(rows[:, chosen], counts=[8, 8], weights=[0.5, 0.5])
                wanted[group] += part.trace_covariance
            accumulate(model, optimizer, rank=rank.rank, step=step, counts=(8,))
            optimizer.step()
    found: dict[str, float] = {}
    for block in (block for report in reports for block in report.blocks):
        for entry in block.sums:
            found[entry.group] = found.get(entry.group, 0.0) + entry.trace_covariance
    return found, wanted


def by_function(name: str, parameter: nn.Parameter) -> str:
    """The same two groups."""
    return "middle" if name.startswith("middle.") and parameter.requires_grad else "rest"


@pytest.mark.parametrize(
    "groups",
    ["param_groups", {"middle": "middle.*", "rest": "*"}, by_function],
    ids=["optimizer", "names", "function"],
)
def test_ddp_groups_survive_the_bucket_rebuild(two_ranks: Ranks, groups: Any) -> None:
    """DDP's buckets are made anew after the first step; groups stay with their parameters."""
    found, wanted = two_ranks.run(grouped_ddp_job, groups=groups)[0]
    assert set(found) == {"total", "middle", "rest"}
    for group, value in wanted.items():
        assert found[group] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (["nothing*"], "fits none"),
        ("middle*", "param_groups"),
        (3, "param_groups"),
        ({"total": "*"}, 'not "total"'),
        ({"a b": "*"}, "letters"),
        (lambda name, parameter: name[:1] + str(id(parameter)), ""),
    ],
)
def test_wrong_groups(groups: Any, words: str) -> None:
    """Groups that fit nothing or have no proper name are refused with what to write."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if not words:
        noisescale.attach(model, optimizer, samples="micro_batch", groups=groups).detach()
        return
    with pytest.raises(InvalidInputError, match="groups") as raised:
        noisescale.attach(model, optimizer, samples="micro_batch", groups=groups)
    assert words in str(raised.value)


@pytest.mark.parametrize("count", [64, 65])
def test_at_most_64_groups(count: int) -> None:
    """A group for each of 64 parameters is measured; 65 are refused."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(count)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    arguments: dict[str, Any] = {"samples": "micro_batch", "groups": lambda name, parameter: f"group-{name}"}
    if count > 64:
        with pytest.raises(InvalidInputError, match="more than 64 groups"):
            noisescale.attach(model, optimizer, **arguments)
        return
    with noisescale.attach(model, optimizer, every=1, report_to=reports, **arguments):
        for _ in range(2):
            (model(torch.randn(4, 2)).sum() / 2).backward()
        optimizer.step()
    (block,) = [block for report in reports for block in report.blocks]
    assert len({entry.group for entry in block.sums}) == 65  # the total too


def test_wrong_samples() -> None:
    """An unknown samples= or loss_reduction= is refused; so is an inner hook without DDP."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(InvalidInputError, match="loss_reduction"):
        noisescale.attach(model, optimizer, samples="micro_batch", loss_reduction="sum")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="inner_hook"):
        noisescale.attach(model, optimizer, samples="micro_batch", inner_hook=lambda state, bucket: None)


def join_job(rank: Rank) -> int:
    """An uneven epoch under Join, by micro-batches: rank 1 has more steps."""
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    monitor = noisescale.attach(model, optimizer, every=1, report_to=reports, samples="micro_batch")
    with Join([model]):
        for step in range(4 + 3 * rank.rank):
            accumulate(model, optimizer, rank=rank.rank, step=step, counts=(8, 8))
            optimizer.step()
    monitor.close()
    dist.barrier()
    return reports.sums()[2]


def test_uneven_epoch_by_micro_batches(two_ranks: Ranks) -> None:
    """A rank that is left alone still has 2 micro-batches, and so a spread."""
    assert two_ranks.run(join_job)[0] == 7
    assert batch_of(0, 0, 3)[0].shape == (3, 16)
