"""The parts behind every capture, put together: who measures, who reports, where to."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from noisescale.hooks.destinations import run_name, sink_for
from noisescale.hooks.geometry.sampled import SampledGeometries
from noisescale.hooks.groups import LayerGroups, resolve_groups
from noisescale.hooks.measuring import UNSYNCED_ACCUMULATION, Measuring
from noisescale.hooks.optimizers import describe, resolve_optimizer
from noisescale.hooks.options import Options
from noisescale.hooks.overhead import OverheadMeter
from noisescale.hooks.reporter import RankZeroReporter, Reporter, SilentReporter
from noisescale.hooks.run_info import run_info
from noisescale.hooks.sampling import SampledBy, Sampling
from noisescale.hooks.steps import StepReader


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a capture measures through.

    Attributes:
        optimizer: The torch optimizer that trains the model.
        reports: Whether this rank is the one that reports.
    """

    measuring: Measuring
    reporter: Reporter
    optimizer: Optimizer
    groups: LayerGroups
    run: str

    @property
    def reports(self) -> bool:
        return self.measuring.rank == 0


def assemble(
    model: nn.Module,
    optimizer: Optimizer | None,
    options: Options,
    *,
    group: dist.ProcessGroup | None,
    sampled_by: SampledBy,
    labels: Mapping[str, str] | None = None,
    sharded: bool = False,
    device: torch.device | None = None,
    carried_means: str = UNSYNCED_ACCUMULATION,
) -> Assembly:
    """Check the options and build; every rank of the group calls it.

    Args:
        group: The model's data-parallel ranks; None is one process alone.
        labels: Of the run, beside the user's.
        sharded, carried_means: As of Measuring.
        device: Where the model computes; None is where its parameters are.

    Raises:
        OptimizerNotFoundError, InvalidInputError: As noisescale.attach; alike on every rank, and before
            anything is started.
    """
    trained_by = resolve_optimizer(model, optimizer)
    sampling = Sampling(by=sampled_by, loss_reduction=options.loss_reduction or "mean")
    geometries = _geometries(model, trained_by, options, sampling=sampling)
    names = geometries.geometries if geometries is not None else ()
    groups = resolve_groups(options.groups, model=model, optimizer=trained_by)
    meter = OverheadMeter(options.every, max_overhead=options.max_overhead)
    name = run_name(options.run)
    world_size = 1 if group is None else group.size()
    info = run_info(
        model,
        optimizer_fields=describe(trained_by, given=optimizer),
        dp_world_size=world_size,
        loss_reduction=options.loss_reduction,
        samples=sampled_by,
        tuned=options.tuned,
        max_micro_batch_size=options.max_micro_batch_size,
        labels={**(labels or {}), **(options.labels or {})},
    )
    # On every rank, so that what cannot be right raises on every rank.
    sink = sink_for(options.report_to, run=name, token=options.token)
    attempt = time.time_ns() // 1_000_000
    reporter: Reporter
    rank = 0 if group is None else dist.get_rank(group)
    if rank == 0:
        reporter = RankZeroReporter(
            sink=sink,
            info=info,
            reader=StepReader(
                world_size=world_size,
                sampling=sampling,
                groups=groups.names,
                geometries=names,
                sharded=sharded,
            ),
            meter=meter,
            world_size=world_size,
            batch_unit=options.batch_unit,
            attempt=attempt,
        )
    else:
        reporter = SilentReporter(rank=rank, batch_unit=options.batch_unit, meter=meter, attempt=attempt)
    measuring = Measuring(
        group=group,
        device=device or _device_of(model),
        meter=meter,
        consumer=reporter,
        groups=len(groups.names),
        sampling=sampling,
        geometries=geometries,
        sharded=sharded,
        carried_means=carried_means,
    )
    return Assembly(measuring=measuring, reporter=reporter, optimizer=trained_by, groups=groups, run=name)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients are measured."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _geometries(
    model: nn.Module, optimizer: Optimizer, options: Options, *, sampling: Sampling
) -> SampledGeometries | None:
    names = options.other_geometries
    if not names:
        return None
    return SampledGeometries(
        names,
        every=options.geometry_every,
        parameters=trainable(model),
        optimizer=optimizer,
        sampling=sampling,
    )


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
