"""Models sharded by fully_shard are measured as float64 gradients of every micro-batch say."""

import contextlib
import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import noisescale
from noisescale.errors import UnsupportedModelError
from noisescale.moments import StepMoments
from tests.hooks.faults import Fault
from tests.hooks.ranks import Rank, Ranks
from tests.hooks.test_micro_batches import gradients_of, moments_of
from tests.hooks.training import Reports, SmallNet, batch_of, logged, loss_of, small_net, sum_of

BATCH = 8


class TiedNet(nn.Module):
    """Its first and last layers, shards of one group, have the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.middle(torch.relu(self.first(x)))))
        return result


class CheckpointedNet(SmallNet):
    """Runs its middle layer again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = torch.tanh(checkpoint(self.middle, hidden, use_reentrant=self.reentrant))
        result: Tensor = self.last(hidden * self.scale)
        return result


NETS: dict[str, Any] = {
    "small": SmallNet,
    "tied": TiedNet,
    "checkpointed": functools.partial(CheckpointedNet, reentrant=False),
    "checkpointed-reentrant": functools.partial(CheckpointedNet, reentrant=True),
}


def sharded_net(*, net: str = "small", shape: Sequence[int] | None = None, **options: Any) -> Any:
    """A net, the same every time, with two of its layers and itself under fully_shard.

    Args:
        shape: Of a mesh of replicas and shards; None shards over all ranks.
    """
    torch.manual_seed(11)
    model = NETS[net]()
    world = dist.get_world_size()
    if shape is None:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard"))
    for part in ([model.first, model.last], model.middle) if net == "tied" else (model.first, model.middle):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Unsharded copies of the weights."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def loss_of_sharded(model: nn.Module, rank: int, number: int) -> Tensor:
    inputs, labels = batch_of(rank, number, BATCH)
    output: Tensor = model(inputs)
    return nn.functional.cross_entropy(output.float(), labels)


def sharded_job(
    rank: Rank,
    *,
    build: dict[str, Any],
    micro_batches: int = 1,
    deferred: str | None = None,
    rel: float = 1e-4,
    clip: bool = False,
    groups: Any = None,
    compiled: bool = False,
    evaluated: bool = False,
    frozen_from: int | None = None,
    steps: int = 20,
) -> bool:
    """Trains with the monitor and without; checks the sums on rank 0; whether the weights are the same.

    Args:
        deferred: Name of the setter of what is put off until the last micro-batch.
        evaluated: Whether a forward pass without gradients comes before attaching.
        frozen_from: Step from which on the middle layer is frozen.
    """
    results = []
    reports = Reports()
    wanted: list[StepMoments] = []
    for measured in (False, True):
        model = sharded_net(**build)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        monitor = None
        if compiled:
            model.compile(backend="aot_eager")
        if evaluated:
            with torch.no_grad():
                loss_of_sharded(model, rank.rank, 0)
        if measured:
            monitor = noisescale.attach(model, optimizer, every=1, report_to=reports, groups=groups)
        for step in range(steps):
            frozen = frozen_from is not None and step >= frozen_from
            model.middle.requires_grad_(not frozen)
            if measured:
                alone = NETS[build.get("net", "small")]()
                alone.load_state_dict(whole_state(model))
                alone.middle.requires_grad_(not frozen)
                first = step * micro_batches
                ranks = range(rank.world_size)
                numbers = [(r, first + j, BATCH) for r in ranks for j in range(micro_batches)]
                count = len(numbers)
                gradients = gradients_of(alone, numbers)
                wanted.append(moments_of(gradients, counts=[BATCH] * count, weights=[1 / count] * count))
            optimizer.zero_grad()
            for j in range(micro_batches):
                if deferred is not None:
                    getattr(model, deferred)(j == micro_batches - 1)
                loss = loss_of_sharded(model, rank.rank, step * micro_batches + j)
                (loss / micro_batches).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        if monitor is not None:
            monitor.close()
        results.append(whole_state(model))
    if rank.rank == 0:
        trace, signal, measured_steps = reports.sums()
        assert measured_steps == steps
        assert trace == pytest.approx(sum_of(wanted)[0], rel=rel)
        assert signal == pytest.approx(sum_of(wanted)[1], rel=rel, abs=rel * abs(trace))
        info = reports[-1].run
        assert (info.dp_world_size, info.samples, info.accumulation_steps) == (
            rank.world_size,
            "micro_batch",
            micro_batches,
        )
    return all(torch.equal(results[0][name], results[1][name]) for name in results[0])


HALF = MixedPrecisionPolicy(reduce_dtype=torch.float16)
BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
COMPUTED_IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SYNC, ALL_REDUCE = "set_requires_gradient_sync", "set_requires_all_reduce"

CASES: dict[str, dict[str, Any]] = {
    "plain": {"build": {}},
    "kept-unsharded": {"build": {"reshard_after_forward": False}},
    "accumulation": {"build": {}, "micro_batches": 3},
    "deferred-accumulation": {"build": {}, "micro_batches": 3, "deferred": SYNC},
    "clipped": {"build": {}, "clip": True},
    # The optimizer's gradient itself is rounded, to 11 and 8 bits.
    "fp16-reduction": {"build": {"mp_policy": HALF}, "rel": 3e-3},
    "bf16-reduction": {"build": {"mp_policy": BF16}, "rel": 2e-2},
    "bf16-compute": {"build": {"mp_policy": COMPUTED_IN_BF16}, "rel": 2e-2},
    "fp16-deferred": {"build": {"mp_policy": HALF}, "micro_batches": 2, "deferred": SYNC, "rel": 3e-3},
    "offloaded": {"build": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    "tied": {"build": {"net": "tied"}},
    "checkpointed": {"build": {"net": "checkpointed"}},
    "checkpointed-reentrant": {"build": {"net": "checkpointed-reentrant"}},
    "compiled": {"build": {}, "compiled": True},
    "evaluated-before": {"build": {}, "evaluated": True},
    "frozen-in-mid-run": {"build": {}, "frozen_from": 7},
    "groups": {"build": {}, "groups": {"middle": "middle.*", "rest": "*"}},
}


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_the_reference(two_ranks: Ranks, name: str) -> None:
    """FSDP2 in its modes: the moments of float64 gradients, and weights bitwise those without."""
    assert all(two_ranks.run(sharded_job, **CASES[name]))


MESHES: dict[str, dict[str, Any]] = {
    "hsdp-2x2": {"build": {"shape": (2, 2)}},
    "hsdp-4x1": {"build": {"shape": (4, 1)}},
    "hsdp-1x4": {"build": {"shape": (1, 4)}},
    "hsdp-2x2-fp16": {"build": {"shape": (2, 2), "mp_policy": HALF}, "rel": 3e-3},
    "hsdp-2x2-bf16": {"build": {"shape": (2, 2), "mp_policy": BF16}, "rel": 2e-2},
    "hsdp-2x2-deferred": {"build": {"shape": (2, 2)}, "micro_batches": 2, "deferred": SYNC},
    "hsdp-2x2-deferred-all-reduce": {"build": {"shape": (2, 2)}, "micro_batches": 2, "deferred": ALL_REDUCE},
    "fsdp-4": {"build": {}},
}


@pytest.mark.parametrize("name", MESHES)
def test_mesh_layout_is_no_matter(four_ranks: Ranks, name: str) -> None:
    """Sharded, replicated or both, shards of the whole too: nothing is counted twice or left out."""
    assert all(four_ranks.run(sharded_job, **MESHES[name], steps=6))


def weighed_job(rank: Rank, *, reduction: str | None, scaled: bool) -> list[tuple[float, float, int]]:
    """Sums over 8 steps of uneven micro-batches: of the same net sharded, and under DDP."""
    counts = [[3, 9, 4], [16, 5, 8]]
    total = sum(sum(row) for row in counts) if reduction == "global_mean" else None
    found = []
    for sharded in (True, False):
        model: Any = sharded_net() if sharded else DistributedDataParallel(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        reports = Reports()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled and sharded)
        monitor = noisescale.attach(
            model,
            optimizer,
            every=1,
            report_to=reports,
            samples="micro_batch",
            loss_reduction=reduction,  # type: ignore[arg-type]  # a parameter of the test
            grad_scaler=scaler,
        )
        for step in range(8):
            optimizer.zero_grad()
            for index, count in enumerate(counts[rank.rank]):
                last = index == 2
                with contextlib.nullcontext() if sharded or last else model.no_sync():
                    loss = loss_of(model, rank.rank, 3 * step + index, count)
                    weight = 1 / 3 if total is None else rank.world_size * count / total
                    scaler.scale(loss * weight).backward()
            scaler.step(optimizer)
            scaler.update()
        monitor.close()
        found.append(reports.sums())
    return found


@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss-scale"])
@pytest.mark.parametrize("reduction", ["mean", "global_mean"])
def test_uneven_sharded_equals_ddp(two_ranks: Ranks, reduction: str, scaled: bool) -> None:
    """Uneven counts, token-weighted or not, a loss scale that changes in mid-run: as under DDP."""
    sharded, replicated = two_ranks.run(weighed_job, reduction=reduction, scaled=scaled)[0]
    assert sharded == pytest.approx(replicated, rel=1e-4)
    assert sharded[2] == 8


def grouped_sums(rank: Rank) -> dict[str, float]:
    model = sharded_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    groups = {"middle": "middle.*", "rest": "*"}
    with noisescale.attach(model, optimizer, every=1, report_to=reports, groups=groups):
        for step in range(4):
            optimizer.zero_grad()
            loss_of_sharded(model, rank.rank, step).backward()
            optimizer.step()
    sums: dict[str, float] = {}
    for entry in (entry for report in reports for block in report.blocks for entry in block.sums):
        sums[entry.group] = sums.get(entry.group, 0.0) + entry.trace_covariance
    return sums


def test_groups_of_shards(two_ranks: Ranks) -> None:
    """Layer groups of a sharded model add up to the total."""
    sums = two_ranks.run(grouped_sums)[0]
    assert sums["middle"] + sums["rest"] == pytest.approx(sums["total"], rel=1e-6)
    assert 0 < sums["middle"] < sums["total"]


def failing_job(rank: Rank, *, where: str, at_rank: int) -> tuple[bool, list[str], int]:
    """Measuring raises on one rank, from step 4 on."""
    results = []
    fault = Fault()
    broken = fault.inside(where) if rank.rank == at_rank else contextlib.nullcontext()
    with logged() as lines, broken:
        for measured in (False, True):
            model = sharded_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            if measured:
                monitor = noisescale.attach(model, optimizer, every=1)
            for step in range(15):
                fault.on = measured and step >= 4
                optimizer.zero_grad()
                loss_of_sharded(model, rank.rank, step).backward()
                optimizer.step()
            if measured:
                monitor.close()
            results.append(whole_state(model))
    same = all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    return same, lines, fault.raised


@pytest.mark.parametrize("at_rank", [0, 1])
@pytest.mark.parametrize(
    "where",
    [
        "micro_batches.square_norm",
        "micro_batches.half_sign",
        "stepwise.square_norm",
        "forwards.count_by",
        "stepwise.learning_rate_of",
        "stepwise.StepwiseCapture._take",
        "stepwise.StepwiseCapture._watch_for_accumulation",
        "stepwise.SumSquares.watch",
        "options.Options.unscale",
        "measuring.pack",
    ],
)
def test_failure_on_one_rank_of_a_sharded_model(two_ranks: Ranks, where: str, at_rank: int) -> None:
    """Told once, and both ranks train on with the same bits."""
    answers = two_ranks.run(failing_job, where=where, at_rank=at_rank)
    assert [same for same, _, _ in answers] == [True, True]
    assert answers[at_rank][2] > 0, "the fault was never met"
    failed = [line for line in answers[at_rank][1] if "failed on rank" in line]
    assert len(failed) == 1


def syncs_and_hooks(rank: Rank) -> tuple[list[str], bool, int]:
    """Host waits in measured steps; whether hooks are left after detach(); steps measured."""
    model = sharded_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = noisescale.attach(model, optimizer, every=1)
    waits = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"}

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of_sharded(model, rank.rank, number).backward()
        optimizer.step()

    step(0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(1, 6):
            step(number)
    names = [event.name for event in profiler.events() if event.name in waits]
    measured = monitor.estimate().measured_steps
    between = hooked(model)
    loss_of_sharded(model, rank.rank, 6)
    # 9 parameters: one hook on each shard, two on the whole.
    assert (between, hooked(model)) == (0, 27)
    monitor.detach()
    step(7)
    left = (
        hooked(model) + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    )
    return names, bool(left), measured


def hooked(model: Any) -> int:
    """Hooks on the parameters, sharded and unsharded."""
    modules = (model, model.first, model.middle)
    for module in modules:
        module.reshard()
    parameters = {id(p): p for p in model.parameters()}
    for module in modules:
        module.unshard()
        parameters |= {id(p): p for p in module.parameters()}
        module.reshard()
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(p, kind, None) or ()) for p in parameters.values() for kind in kinds)


def test_sharded_steps_do_not_wait_and_leave_no_hooks(two_ranks: Ranks) -> None:
    """No item() in measured steps; after detach() no hooks of ours."""
    answers = two_ranks.run(syncs_and_hooks)
    assert [names for names, _, _ in answers] == [[], []]
    assert [left for _, left, _ in answers] == [False, False]
    assert answers[0][2] == 6


def refusals(rank: Rank) -> dict[str, str]:
    """What attach() says of sharded models that it does not measure."""
    told = {}

    def refusal(name: str, model: nn.Module, **arguments: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        try:
            noisescale.attach(model, optimizer, **arguments).detach()
            told[name] = "attached"
        except UnsupportedModelError as error:
            told[name] = str(error)

    refusal("geometry", sharded_net(), geometry="sign")
    factor = sharded_net()
    factor.set_gradient_divide_factor(3.0)  # type: ignore[operator]  # FSDPModule
    refusal("factor", factor)
    partly = small_net()
    fully_shard(partly.middle)
    refusal("partly", partly)
    with torch.device("meta"):
        weightless = small_net()
    refusal("meta", fully_shard(weightless))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    parallel = parallelize_module(small_net(), mesh["tensor"], {"middle": ColwiseParallel()})
    refusal("tensor-parallel", fully_shard(parallel, mesh=mesh["data"]))
    refusal("fsdp1", FullyShardedDataParallel(copy.deepcopy(small_net()), device_id=torch.device("cpu")))
    return told


def test_refused_sharded_models(two_ranks: Ranks) -> None:
    """Each is told with what to do instead."""
    told = two_ranks.run(refusals)[0]
    assert "sharded" in told["geometry"]
    assert "set_gradient_divide_factor" in told["factor"]
    assert "apply fully_shard to the root" in told["partly"]
    assert "to_empty" in told["meta"]
    assert "tensor parallelism" in told["tensor-parallel"]
    assert "fully_shard" in told["fsdp1"]


def unsynced_job(rank: Rank) -> tuple[list[str], int]:
    """From the fourth step on, gradients are no more synchronised, which is a mistake."""
    model = sharded_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = Reports()
    with logged() as lines, noisescale.attach(model, optimizer, every=1, report_to=reports):
        for step in range(10):
            model.set_requires_gradient_sync(step < 3)
            optimizer.zero_grad()
            loss_of_sharded(model, rank.rank, step).backward()
            optimizer.step()
    return lines, reports.sums()[2] if rank.rank == 0 else 3


def test_gradients_that_are_never_synchronised(two_ranks: Ranks) -> None:
    """A step whose gradients do not reach the optimizer is no measurement: one error, nothing more."""
    for lines, steps in two_ranks.run(unsynced_job):
        assert steps == 3
        assert len([line for line in lines if "failed on rank" in line]) == 1


def one_rank_mesh_job(rank: Rank) -> tuple[float, float]:
    """tr(Sigma) of a model sharded over this rank alone, and of the same one without fully_shard."""
    mesh = init_device_mesh("cpu", (rank.world_size, 1), mesh_dim_names=("other", "shard"))["shard"]
    found = []
    for sharded in (True, False):
        model = small_net()
        if sharded:
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        reports = Reports()
        with noisescale.attach(model, optimizer, every=1, report_to=reports, samples="micro_batch"):
            for step in range(6):
                optimizer.zero_grad()
                for j in range(2):
                    (loss_of_sharded(model, rank.rank, 2 * step + j) / 2).backward()
                optimizer.step()
        assert reports.sums()[2] == 6
        found.append(reports.sums()[0])
    return found[0], found[1]


def test_mesh_of_one_rank(two_ranks: Ranks) -> None:
    """Each rank with a mesh of its own, as in a pipeline: its micro-batches are the samples."""
    for sharded, plain in two_ranks.run(one_rank_mesh_job):
        assert sharded == pytest.approx(plain, rel=1e-6)


def state_job(rank: Rank) -> tuple[int, int]:
    """A checkpoint of the monitor in mid-run, and going on from it."""
    model = sharded_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = noisescale.attach(model, optimizer, every=1)
    for step in range(5):
        optimizer.zero_grad()
        loss_of_sharded(model, rank.rank, step).backward()
        optimizer.step()
    state = monitor.state_dict()
    monitor.detach()
    again = noisescale.attach(model, optimizer, every=1)
    again.load_state_dict(state)
    for step in range(5, 8):
        optimizer.zero_grad()
        loss_of_sharded(model, rank.rank, step).backward()
        optimizer.step()
    again.close()
    return again.estimate().measured_steps, 8 if rank.rank == 0 else 0


def test_sharded_state_goes_on(two_ranks: Ranks) -> None:
    """state_dict() and load_state_dict() work as for DDP."""
    for found, wanted in two_ranks.run(state_job):
        assert found == wanted
