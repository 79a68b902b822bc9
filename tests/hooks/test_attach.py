"""attach() refuses what cannot be measured, and says what to write instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.errors import NoiseScaleError
from noisescale.wire import TunedBase
from tests.hooks.ranks import Rank, Ranks
from tests.hooks.training import Reports, logged, loss_of, small_net


def refusal(
    make: Callable[[], nn.Module] = small_net,
    *,
    optimizer: Any = "sgd",
    prepare: Callable[[DistributedDataParallel], Any] | None = None,
    wrap: bool = True,
    **arguments: Any,
) -> str:
    """The message of the error that attach() raises, with its class."""
    inner = make()
    model = DistributedDataParallel(inner) if wrap else inner
    keep = prepare(model) if prepare and isinstance(model, DistributedDataParallel) else None
    if optimizer == "sgd":
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.1) if trainable else None
    try:
        noisescale.attach(model, optimizer, **arguments).detach()
    except NoiseScaleError as error:
        return f"{type(error).__name__}: {error}"
    del keep
    return "attached"


def frozen() -> nn.Module:
    net = nn.Linear(4, 4)
    net.requires_grad_(False)
    return nn.Sequential(net, nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 1))


def sparse() -> nn.Module:
    return nn.Embedding(4, 4, sparse=True)


def take_hook(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def take_builtin_hook(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def two_optimizers(model: DistributedDataParallel) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)]


def wrong_things(rank: Rank) -> dict[str, str]:
    """What each wrong call says."""
    dist.barrier()
    power = (powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    return {
        "module": refusal(wrap=False),
        "hook-taken": refusal(prepare=take_hook),
        "builtin-hook-taken": refusal(prepare=take_builtin_hook),
        "no-optimizer": refusal(optimizer=None),
        "two-optimizers": refusal(optimizer=None, prepare=two_optimizers),
        "no-optimizer-at-all": refusal(optimizer="adam"),
        "sparse": refusal(sparse),
        "run": refusal(run="a b"),
        "report-to": refusal(report_to="ftp://x"),
        "every": refusal(every=0),
        "every-word": refusal(every="often"),
        "unit": refusal(batch_unit="words"),
        "max-overhead": refusal(max_overhead=0),
        "tuned": refusal(tuned={"global_batch_size": -1, "learning_rate": 0.1}),
        "tuned-names": refusal(tuned={"batch": 1}),
        "memory": refusal(max_micro_batch_size=0),
        "labels": refusal(labels={"team": 3}),
        "power-sgd": refusal(inner_hook=power),
        "batched-power-sgd": refusal(inner_hook=(power[0], powerSGD_hook.batched_powerSGD_hook)),
        "compressed-power-sgd": refusal(
            inner_hook=(power[0], default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
        ),
        "quantised": refusal(inner_hook=quantization_hooks.quantization_pertensor_hook),
        "no-hook": refusal(inner_hook=(None, 3)),
        "frozen-part": refusal(frozen),
    }


EXPECTED = {
    "module": ("UnsupportedModelError", "DistributedDataParallel"),
    "hook-taken": ("CommHookTakenError", "inner_hook="),
    "builtin-hook-taken": ("CommHookTakenError", "inner_hook="),
    "no-optimizer": ("OptimizerNotFoundError", "attach(model, optimizer)"),
    "two-optimizers": ("OptimizerNotFoundError", "Adam, SGD"),
    "no-optimizer-at-all": ("OptimizerNotFoundError", "str"),
    "sparse": ("UnsupportedModelError", "sparse=False"),
    "run": ("InvalidInputError", "'a b'"),
    "report-to": ("InvalidInputError", "http://HOST:PORT"),
    "every": ("InvalidInputError", '"auto"'),
    "every-word": ("InvalidInputError", '"auto"'),
    "unit": ("InvalidInputError", '"tokens"'),
    "max-overhead": ("InvalidInputError", "max_overhead"),
    "tuned": ("InvalidInputError", "tuned"),
    "tuned-names": ("InvalidInputError", "tuned"),
    "memory": ("InvalidInputError", "max_micro_batch_size"),
    "labels": ("InvalidInputError", "labels"),
    "power-sgd": ("UnsupportedModelError", "43%"),
    "batched-power-sgd": ("UnsupportedModelError", "square norm"),
    "compressed-power-sgd": ("UnsupportedModelError", "43%"),
    "quantised": ("UnsupportedModelError", "8 bits"),
    "no-hook": ("UnsupportedModelError", "(state, hook)"),
    "frozen-part": ("attached", ""),
}


def test_wrong_calls_say_what_to_write(two_ranks: Ranks) -> None:
    """Every wrong argument or model is an error of ours, alike on all ranks, that names the way out."""
    for told in two_ranks.run(wrong_things):
        assert told.keys() == EXPECTED.keys()
        for name, (error, words) in EXPECTED.items():
            assert told[name].startswith(error), (name, told[name])
            assert words in told[name], (name, told[name])


def forward_errors(rank: Rank) -> dict[str, str]:
    """What the first forward says where its inputs cannot be counted."""

    class Wordy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, text: str) -> Tensor:
            return self.weight.sum() * len(text)

    told = {}
    counts: dict[str, dict[str, Any]] = {
        "uncountable": {},
        "tensor": {"count": lambda args, kwargs: torch.tensor(3)},
        "negative": {"count": lambda args, kwargs: -1},
        "raises": {"count": lambda args, kwargs: args[5]},
        "tokens": {"batch_unit": "tokens"},
    }
    for name, arguments in counts.items():
        model = DistributedDataParallel(Wordy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = noisescale.attach(model, optimizer, **arguments)
        with pytest.raises((NoiseScaleError, IndexError)) as raised:
            model("four")
        told[name] = f"{type(raised.value).__name__}: {raised.value}"
        monitor.detach()
    return told


def test_uncountable_batches_are_told_before_anything_is_trained(two_ranks: Ranks) -> None:
    """The first forward pass says what to pass as count=."""
    told = two_ranks.run(forward_errors)[0]
    assert "pass count=lambda args, kwargs" in told["uncountable"]
    assert "number of tokens" in told["tokens"]
    assert "returned a tensor" in told["tensor"]
    assert "count= returned -1" in told["negative"]
    assert told["raises"].startswith("IndexError")


def found_optimizer(rank: Rank) -> tuple[float | None, str | None]:
    """attach(model) with no optimizer finds the one there is; LR and family as reported."""
    model = DistributedDataParallel(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)
    reports = Reports()
    with noisescale.attach(model, every=1, report_to=reports):
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step, 8).backward()
            optimizer.step()
            scheduler.step()
    if rank.rank != 0:
        return None, None
    rates = [block.learning_rate for report in reports for block in report.blocks]
    info = reports[-1].run
    assert info is not None
    assert rates[0] is not None
    assert rates[0] <= 3e-4
    return rates[-1], info.optimizer


def test_optimizer_is_found_and_followed(two_ranks: Ranks) -> None:
    """With one optimizer there is no need to name it; its family and its scheduled LR are reported."""
    rate, family = two_ranks.run(found_optimizer)[0]
    assert rate == pytest.approx(3e-4)
    assert family == "adamw"


def tokens_job(rank: Rank) -> tuple[float, str, int]:
    """A language model of sorts counts tokens."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 8)
            self.last = nn.Linear(8, 10)

        def forward(self, ids: Tensor, *, mask: Tensor) -> Tensor:
            logits: Tensor = self.last(self.embedding(ids) * mask[..., None])
            return logits

    model = DistributedDataParallel(Words())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reports = Reports()
    generator = torch.Generator().manual_seed(rank.rank)
    monitor = noisescale.attach(
        model,
        optimizer,
        every=1,
        batch_unit="tokens",
        report_to=reports,
        tuned=TunedBase(global_batch_size=96, learning_rate=0.1),
    )
    with monitor:
        for _ in range(12):
            ids = torch.randint(0, 10, (4, 6), generator=generator)
            optimizer.zero_grad()
            logits = model(ids, mask=torch.ones(4, 6))
            nn.functional.cross_entropy(logits.view(-1, 10), ids.view(-1)).backward()
            optimizer.step()
        # An evaluation without gradients is no training.
        with torch.no_grad():
            model(torch.zeros(100, 6, dtype=torch.long), mask=torch.ones(100, 6))
    estimate = monitor.estimate()
    examples = sum(block.examples for report in reports for block in report.blocks)
    return estimate.global_batch_size or 0.0, estimate.batch_unit, examples


def test_tokens_are_counted(two_ranks: Ranks) -> None:
    """batch_unit="tokens" counts the elements of the first integer tensor, over all ranks."""
    assert two_ranks.run(tokens_job)[0] == (48, "tokens", 12 * 48)


def alone_job(rank: Rank) -> tuple[str, list[str]]:
    """DDP over one rank."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = DistributedDataParallel(small_net(), process_group=groups[rank.rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as lines:
        try:
            noisescale.attach(model, optimizer)
        except NoiseScaleError as error:
            return f"{type(error).__name__}: {error}", lines
    return "attached", lines


def test_one_rank_has_no_spread(two_ranks: Ranks) -> None:
    """A process group of one rank is refused, with the command that starts two."""
    told, _ = two_ranks.run(alone_job)[0]
    assert told.startswith("UnsupportedModelError")
    assert "torchrun --nproc-per-node 2" in told
