"""`noisescale.attach`: one line in a training script."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from noisescale.blocks import BatchUnit
from noisescale.errors import CommHookTakenError, InvalidInputError
from noisescale.hooks.accumulation import capture_alone
from noisescale.hooks.counting import Count
from noisescale.hooks.ddp import NoiseScaleState, check_model, noise_scale_hook
from noisescale.hooks.destinations import ReportTo
from noisescale.hooks.fsdp import capture_sharded, is_sharded
from noisescale.hooks.geometry.sampled import DEFAULT_EVERY, GeometryChoice
from noisescale.hooks.groups import Groups
from noisescale.hooks.inner_hooks import InnerHook
from noisescale.hooks.monitor import Monitor
from noisescale.hooks.norm_layers import capture_norm_layers
from noisescale.hooks.options import Options
from noisescale.hooks.run_info import Tuned
from noisescale.hooks.sampling import LossReduction, SampledBy


def attach(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    report_to: ReportTo = None,
    run: str | None = None,
    every: int | str = "auto",
    batch_unit: BatchUnit = "examples",
    count: Count | None = None,
    inner_hook: InnerHook | None = None,
    token: str | None = None,
    tuned: Tuned = None,
    max_micro_batch_size: int | None = None,
    labels: Mapping[str, str] | None = None,
    max_overhead: float = 0.01,
    grad_scaler: Any = None,
    samples: SampledBy | None = None,
    loss_reduction: LossReduction | None = None,
    groups: Groups = None,
    geometry: GeometryChoice = "euclidean",
    geometry_every: int = DEFAULT_EVERY,
) -> Monitor:
    """Measure the noise scale of a model's training from now on. Call it on every rank.

    Nothing else changes in the training loop, and the gradients stay bit for bit what they were.
    Measuring never stops training: what goes wrong later is logged once, and measuring ends.

    Args:
        model: A DistributedDataParallel of at least 2 ranks, before its first step; a model that
            fully_shard was applied to; or, with samples="micro_batch", any module that one process
            trains.
        optimizer: That trains it; may be wrapped. None finds the one that holds its parameters.
        report_to: "http://HOST:PORT" of a noisescale server, "file:PATH.jsonl", a function that
            takes one noisescale.wire.BlocksReport, or None: ask the monitor.
        run: The run's name, [A-Za-z0-9._-]{1,128}; None makes one of script, machine and time.
        every: Measure every so many steps; "auto" keeps the cost under max_overhead. Rank 0's counts.
        batch_unit: "examples" (dim 0 of the first input tensor) or "tokens" (the elements of the
            first integer input tensor).
        count: `lambda args, kwargs: n`, where neither of the two is right; from shapes, of each
            forward pass.
        inner_hook: A comm hook of your own, or (state, hook), to average with.
        token: The server's write token; None reads NOISESCALE_TOKEN.
        tuned: A learning rate that was tuned, and its batch:
            `{"global_batch_size": 256, "learning_rate": 0.1}`; switches the LR audit on.
        max_micro_batch_size: The largest that fits in memory.
        labels: Free key-value pairs, shown with the run.
        max_overhead: For every="auto": the share of the step time that measuring may cost.
        grad_scaler: The GradScaler, if there is one: its scale is taken out of the gradients.
            Without it the noise scale is right but for the steps at which the scale changes.
        samples: "rank" (the default of DDP): what a rank accumulates in a step is one sample.
            "micro_batch" (for all other models): each of its micro-batches is one, which says more from
            the same step; costs a read of each. "norm_layers": single examples at the normalization
            layers, a proxy, for one process without accumulation.
        loss_reduction: "mean": the loss is a mean over its micro-batch (the default, where it is not
            said). "global_mean": it is a sum over examples (or tokens) divided by their number over all
            micro-batches and ranks; count= must then count what the sum runs over.
        groups: Parts of the model that get a noise scale of their own, at most 64: "param_groups",
            patterns of parameter names as ["*attention*", "*mlp*"], a mapping from group to pattern, or a
            function of a parameter's name and the parameter to a group's name or None.
        geometry: One or several of "adam" (weighed by the optimizer's own second moments), "sign" (for
            signSGD, Lion) and "spectral" (for Muon), beside "euclidean". They cost memory and
            communication of the gradients' size: see docs/geometries.md.
        geometry_every: Measure those in every so many of the measured steps.

    Raises:
        CommHookTakenError: The model has a comm hook; pass it as inner_hook.
        OptimizerNotFoundError: None was given, and not exactly one was found.
        BatchCountError: Not here but from the first forward pass, before anything is trained: its
            inputs cannot be counted; pass count.
        UnsupportedModelError: This model is not measured; says what to do.
        InvalidInputError: An argument cannot be right.
    """
    options: dict[str, Any] = {
        "report_to": report_to,
        "run": run,
        "every": every,
        "batch_unit": batch_unit,
        "count": count,
        "token": token,
        "tuned": tuned,
        "max_micro_batch_size": max_micro_batch_size,
        "labels": labels,
        "max_overhead": max_overhead,
        "grad_scaler": grad_scaler,
        "loss_reduction": loss_reduction,
        "groups": groups,
        "geometry": geometry,
        "geometry_every": geometry_every,
    }
    if not isinstance(model, DistributedDataParallel):
        if inner_hook is not None:
            raise InvalidInputError(
                f"inner_hook= is for DistributedDataParallel models, this is a {type(model).__name__}; "
                "leave it out",
                field="inner_hook",
            )
        if samples not in (None, "micro_batch", "norm_layers") or (
            samples == "norm_layers" and is_sharded(model)
        ):
            raise InvalidInputError(
                'samples is "micro_batch", or "norm_layers" in one process, for a model that is not '
                f"DistributedDataParallel, got {samples!r}",
                field="samples",
            )
        if samples == "norm_layers":
            return capture_norm_layers(model, optimizer, Options(**options)).monitor
        if is_sharded(model):
            return capture_sharded(model, optimizer, Options(**options)).monitor
        if samples == "micro_batch":
            return capture_alone(model, optimizer, Options(**options)).monitor
        check_model(model)
        raise TypeError  # never reached: check_model raised
    state = NoiseScaleState(model, optimizer, inner_hook=inner_hook, samples=samples or "rank", **options)
    try:
        model.register_comm_hook(state, noise_scale_hook)
    except RuntimeError as error:
        # One of PyTorch's built-in hooks, of which the model keeps no list.
        state.monitor.detach(0.0)
        raise CommHookTakenError(
            "this DDP model already has a built-in comm hook, and PyTorch allows one; leave out its "
            "registration, or pass the hook as inner_hook="
        ) from error
    return state.monitor
