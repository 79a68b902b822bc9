"""The DistributedDataParallel capture: a communication hook.

`noisescale.attach(model, optimizer)` does all of it; in PyTorch's own idiom it is

    state = NoiseScaleState(model, optimizer, report_to="http://localhost:8000", run="resnet50")
    model.register_comm_hook(state, noise_scale_hook)
    state.monitor.estimate()

The gradients are bit for bit those of DDP without a hook: each bucket is multiplied by 1/R and
summed over ranks, as DDP's own reducer does. (No `from __future__ import annotations` here:
register_comm_hook compares the hook's annotations with the types themselves.)
"""

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not re-exported in its types
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from noisescale.blocks import BatchUnit
from noisescale.errors import CommHookTakenError, InvalidInputError, UnsupportedModelError
from noisescale.hooks.assembly import assemble, trainable
from noisescale.hooks.counting import NO_TALLY, Count, Tally
from noisescale.hooks.destinations import ReportTo
from noisescale.hooks.forwards import Forwards
from noisescale.hooks.geometry.halves import half_sign
from noisescale.hooks.geometry.sampled import DEFAULT_EVERY, GeometryChoice
from noisescale.hooks.groups import Groups, LayerGroups
from noisescale.hooks.inner_hooks import InnerHook, inner_of, reduced_tensor
from noisescale.hooks.measuring import Measuring
from noisescale.hooks.micro_batches import MicroBatchSquares
from noisescale.hooks.monitor import Monitor
from noisescale.hooks.norms import square_norm
from noisescale.hooks.optimizers import learning_rate_of
from noisescale.hooks.options import Options
from noisescale.hooks.publish import Slot
from noisescale.hooks.run_info import Tuned
from noisescale.hooks.sampling import LossReduction, SampledBy

MIN_RANKS = 2
"""One rank has no spread."""


def noise_scale_hook(state: "NoiseScaleState", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: averages as DDP does, and measures on the way."""
    future: torch.futures.Future[torch.Tensor] = state.reduce(bucket)
    return future


class NoiseScaleState:
    """The state of noise_scale_hook, with the monitor of the model it is for.

    Made on every rank of the model's process group, which all take part in it. A copy of it, or
    a pickled one (both happen with the model it hangs on), does not measure; its hook averages.

    Args: see noisescale.attach.

    Attributes:
        monitor: The noise scale, as of noisescale.attach.

    Raises:
        AttachError: The model cannot be measured; says why and what to write instead.
        InvalidInputError: An argument cannot be right.
    """

    monitor: Monitor

    def __init__(
        self,
        model: DistributedDataParallel,
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
        samples: SampledBy = "rank",
        loss_reduction: LossReduction | None = None,
        groups: Groups = None,
        geometry: GeometryChoice = "euclidean",
        geometry_every: int = DEFAULT_EVERY,
    ) -> None:
        check_model(model)
        options = Options(
            report_to=report_to,
            run=run,
            every=every,
            batch_unit=batch_unit,
            count=count,
            token=token,
            tuned=tuned,
            max_micro_batch_size=max_micro_batch_size,
            labels=labels,
            max_overhead=max_overhead,
            grad_scaler=grad_scaler,
            loss_reduction=loss_reduction,
            groups=groups,
            geometry=geometry,
            geometry_every=geometry_every,
        )
        if samples not in ("rank", "micro_batch"):
            raise InvalidInputError(
                f'samples is "rank" or "micro_batch" for a DDP model, got {samples!r}', field="samples"
            )
        group: dist.ProcessGroup = model.process_group
        self._inner = inner_of(inner_hook, group=group)
        flags = {"inner_hook": f"{self._inner.name} (rounds)"} if self._inner and self._inner.rounds else {}
        built = assemble(model, optimizer, options, group=group, sampled_by=samples, labels=flags)
        self._options = options
        self._group: dist.ProcessGroup | None = group
        self._model = weakref.ref(model)
        self._forwards: Forwards | None = Forwards(built.measuring, options)
        self._reports = built.reports
        self._slot: Slot | None = None
        self._carried: Tensor | None = None
        self._divisor = group.size()
        self._groups = built.groups
        self._reset_passes()
        self._measuring: Measuring | None = built.measuring
        parameters = trainable(model)
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._micro_batches: MicroBatchSquares | None = None
        if samples == "micro_batch":
            self._micro_batches = MicroBatchSquares(
                parameters,
                groups=built.groups,
                sampling=built.measuring.sampling,
                on_error=built.measuring.fail,
                rank=built.measuring.rank,
            )
        trained_by = built.optimizer
        self._optimizer = weakref.ref(trained_by)
        probed = parameters[-1]
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            trained_by.register_step_post_hook(self._after_step),
            probed.register_hook(_Probe(self, probed)),  # type: ignore[no-untyped-call]  # torch has no types for it
        ]
        self.monitor = Monitor(self, built.reporter, run=built.run)

    @property
    def passes(self) -> int:
        """Synchronised backward passes since attaching."""
        return self._measuring.passes if self._measuring is not None else 0

    @property
    def is_copy(self) -> bool:
        """Whether this came out of a pickle or a copy, and is registered on no model."""
        return self._group is None

    def collect(self, *, timeout_s: float) -> bool:
        """Read what has been measured and is still on its way."""
        return self._measuring is None or self._measuring.collect(timeout_s=timeout_s)

    def leave(self) -> None:
        """Stop measuring."""
        if self._measuring is not None:
            self._measuring.leave()

    def detach(self) -> None:
        """Stop measuring and take all hooks off that PyTorch lets one take off."""
        self.leave()
        if self._micro_batches is not None:
            self._micro_batches.unwatch()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def reduce(self, bucket: GradBucket) -> Any:
        """What noise_scale_hook does, bucket by bucket, on the thread of backward."""
        index = bucket.index()
        if index == 0:
            self._begin_pass()
        slot = self._slot
        if slot is not None and slot.measuring and self._micro_batches is None:
            self._take_local(slot, bucket)
        future = self._start_reduction(bucket)
        if slot is not None and slot.measuring and self._reports:
            # The parameters of this bucket: it is another one by the time that it is reduced.
            apart = slot.geometry is not None or not self._groups.only_total
            parameters = tuple(bucket.parameters()) if apart else ()
            future = future.then(
                lambda done: self._take_global(slot, index, reduced_tensor(done), parameters)
            )
        elif self._inner is None:
            future = future.then(reduced_tensor)
        if slot is not None and bucket.is_last() and self._measuring is not None:
            # Here, right behind the last bucket's reduction: the one place that is the same on
            # every rank, in Join and with unused parameters too.
            self._slot = None
            self._end_samples(slot)
            self._measuring.send(slot)
        return future

    def _start_reduction(self, bucket: GradBucket) -> Any:
        if self._inner is not None:
            return self._inner.start(bucket)
        buffer = bucket.buffer()
        if self._aliased:
            buffer.div_(self._divisor)
        else:
            buffer.mul_(1.0 / self._divisor)
        return dist.all_reduce(buffer, group=self._group, async_op=True).get_future()

    def _begin_pass(self) -> None:
        tally = self._forwards.take() if self._forwards is not None else NO_TALLY
        self._divisor = self._size_to_divide_by(tally)
        self._passes_since_step += 1
        self._probed = False
        if self._measuring is None:
            return
        slot = self._measuring.begin_pass(tally, divisor=self._divisor)
        self._slot = slot
        if slot is not None and slot.measuring:
            slot.carried = self._carried
            try:
                slot.unscale = self._options.unscale()
            except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the packet
                self._fail(slot, error)
        self._carried = None

    def _size_to_divide_by(self, tally: Tally) -> int:
        """Ranks in the average: all, except in join(divide_by_initial_world_size=False)."""
        size = dist.get_world_size(self._group)
        model = self._model() if self._model is not None else None
        if model is None or self._measuring is None or not model._join_config.enable:
            return size
        if getattr(model, "_divide_by_initial_world_size", True):
            return size
        # DDP itself waits for this number in each forward of that mode.
        active = torch.tensor([float(tally.micro_batches > 0)], device=next(model.parameters()).device)
        dist.all_reduce(active, group=self._measuring.group)
        sharing: float = active.tolist()[0]
        return max(1, round(sharing))

    def _take_local(self, slot: Slot, bucket: GradBucket) -> None:
        started = time.perf_counter()
        try:
            parameters = () if self._groups.only_total else bucket.parameters()
            slot.local_squares[bucket.index()] = self._groups.of_buffer(bucket.buffer(), parameters)
            if slot.geometry is not None and slot.tally.micro_batches > 0 and self._measuring is not None:
                half = half_sign(rank=self._measuring.rank)
                for index, gradient in self._apart(bucket.buffer(), bucket.parameters()):
                    slot.geometry.add(index, gradient, half=half, factor=1.0)
        except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the packet
            self._fail(slot, error)
        slot.cost_s += time.perf_counter() - started

    def _apart(self, buffer: Tensor, parameters: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """A bucket's gradients, each with its parameter's number and in its shape and layout."""
        pieces = torch.split(buffer.detach().reshape(-1), [parameter.numel() for parameter in parameters])
        for piece, parameter in zip(pieces, parameters, strict=True):
            # As DDP lays them out: in the order of the parameter's memory, channels-last too.
            yield (
                self._index[id(parameter)],
                piece.as_strided(parameter.size(), parameter.stride(), piece.storage_offset()),
            )

    def _end_samples(self, slot: Slot) -> None:
        """All of this rank's samples are whole."""
        try:
            if self._micro_batches is None:
                if slot.geometry is not None and slot.tally.micro_batches > 0 and self._measuring is not None:
                    sampling = self._measuring.sampling
                    slot.geometry.end_sample(
                        half=half_sign(rank=self._measuring.rank),
                        raw_weight=sampling.raw_weight(slot.tally.count, micro_batches=1),
                        count=1.0 / slot.tally.inverse_count,
                    )
                return
            slot.cost_s += self._micro_batches.cost_s
            slot.local_squares[0] = self._micro_batches.take(micro_batches=slot.tally.micro_batches)
        except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the packet
            self._fail(slot, error)

    def _take_global(self, slot: Slot, index: int, reduced: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        started = time.perf_counter()
        try:
            slot.global_squares[index] = self._groups.of_buffer(reduced, parameters)
            if slot.geometry is not None:
                for number, gradient in self._apart(reduced, parameters):
                    slot.geometry.mean(number, gradient)
        except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the next packet
            self._fail(slot, error)
        slot.cost_s += time.perf_counter() - started
        return reduced

    def _fail(self, slot: Slot, error: Exception) -> None:
        slot.measuring = False
        if self._measuring is not None:
            self._measuring.fail(error)

    def _before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counted = self._forwards.count(module, args, kwargs) if self._forwards is not None else None
        if counted is not None and self._measuring is not None and self._micro_batches is not None:
            try:
                if self._measuring.decide():
                    self._micro_batches.watch(self._measuring.geometry)
                self._micro_batches.next_micro_batch(counted)
            except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the packet
                self._measuring.fail(error)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._passes_since_step = 0
        if self._reports and self._measuring is not None:
            try:
                self._measuring.note_learning_rate(learning_rate_of(optimizer))
            except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the next packet
                self._measuring.fail(error)

    def _before_accumulation(self, gradient: Tensor | None) -> None:
        """Once per synchronised pass, as the first gradient comes to one parameter.

        Args:
            gradient: What the parameter's gradient is before.
        """
        if self._probed:
            return
        self._probed = True
        model = self._model() if self._model is not None else None
        # DDP divides gradients that already lie in its buckets, and multiplies while copying others.
        self._aliased = gradient is not None and bool(getattr(model, "gradient_as_bucket_view", False))
        if gradient is not None and self._passes_since_step > 0 and self._measuring is not None:
            try:
                self._carried = square_norm(gradient)
            except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the packet
                self._measuring.fail(error)

    def _reset_passes(self) -> None:
        self._passes_since_step = 0
        self._probed = False
        self._aliased = False
        self._carried = None

    def __getstate__(self) -> dict[str, Any]:
        # Process groups, locks and threads cannot be copied, and a copy has no ranks to measure with.
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._inner = None
        self._group = None
        self._model = None  # type: ignore[assignment]  # a copy hangs on no model
        self._measuring = None
        self._micro_batches = None
        self._groups = LayerGroups()
        self._options = Options()
        self._slot = None
        self._forwards = None
        self._reports = False
        self._handles = []
        self._divisor = 1
        self._reset_passes()


class _Probe:
    """A tensor hook on one parameter; says what its gradient was before the new one is added."""

    def __init__(self, state: NoiseScaleState, parameter: Tensor) -> None:
        self._state = state
        self._parameter = weakref.ref(parameter)

    @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]  # torch has no types for it
    def __call__(self, gradient: Tensor) -> None:
        parameter = self._parameter()
        self._state._before_accumulation(None if parameter is None else parameter.grad)


def check_model(model: object) -> None:
    """Whether this capture can measure it.

    Raises:
        UnsupportedModelError: It is no DDP model, or one whose gradients no hook sees as they are.
        CommHookTakenError: It has a comm hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedModelError(
            f"a {type(model).__name__} was given; wrap it first: "
            "attach(torch.nn.parallel.DistributedDataParallel(model), optimizer), apply fully_shard to it "
            "(FSDP2; the older FullyShardedDataParallel wrapper is not measured), or, where one process "
            'accumulates micro-batches, say attach(model, optimizer, samples="micro_batch")'
        )
    if dist.get_world_size(model.process_group) < MIN_RANKS:
        raise UnsupportedModelError(
            "the model's process group has 1 rank, and the noise scale is the spread between ranks; start "
            "at least 2: torchrun --nproc-per-node 2 train.py"
        )
    if getattr(model, "_use_python_reducer", False):
        raise UnsupportedModelError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", whose hooks see no buckets; set it to '
            '"ddp_optimizer" (the default) before the model is made'
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModelError(
            "no parameter of the model requires a gradient; there is nothing to measure"
        )
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        raise UnsupportedModelError(
            "the model has sparse gradients (an Embedding with sparse=True), which are not measured; set "
            "sparse=False"
        )
    if any(not getattr(state, "is_copy", False) for _, state in model._comm_hooks):
        raise CommHookTakenError(
            "this DDP model already has a comm hook, and PyTorch allows one; leave out its "
            "register_comm_hook(state, hook) and pass it as inner_hook=(state, hook)"
        )
