"""Captures whose step ends as the optimizer steps: a process alone, and sharded models.

Micro-batches are the samples. Their gradients are taken one by one in backward; the square norm of
what they come to is taken as each part of it arrives, before gradients are clipped.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from noisescale.errors import UnsupportedModelError
from noisescale.hooks.assembly import Assembly
from noisescale.hooks.forwards import Forwards
from noisescale.hooks.geometry.sampled import GeometryStep
from noisescale.hooks.groups import LayerGroups
from noisescale.hooks.monitor import Monitor
from noisescale.hooks.norms import square_norm
from noisescale.hooks.optimizers import learning_rate_of
from noisescale.hooks.options import Options
from noisescale.hooks.publish import Slot
from noisescale.hooks.uncopied import UncopiedHook

PATIENCE_STEPS = 20
"""Optimizer steps of one sample each after which it is said that nothing can be measured."""

NO_ACCUMULATION = (
    f"noisescale has stopped measuring: {PATIENCE_STEPS} optimizer steps had one micro-batch each, and one "
    "sample has no spread; accumulate at least 2 micro-batches per optimizer step, or train on 2 ranks"
)


class SampleSquares(Protocol):
    """Takes the square norms of one step's samples, as backward gives them.

    Attributes:
        cost_s: Host time spent since the step began.
    """

    cost_s: float

    @property
    def sampled(self) -> frozenset[int] | None:
        """Numbers of the parameters that have got a gradient in this step; None where that is not known."""

    def watch(self, geometry: GeometryStep | None = None) -> None:
        """Begin a step; does nothing in the middle of one."""

    def next_micro_batch(self, count: int) -> None:
        """A forward pass of so many examples (or tokens) is to come."""

    def take(self, *, micro_batches: int) -> Tensor:
        """By layer group, the sum of this rank's squares; ends the step."""

    def unwatch(self) -> None:
        """End the step, and forget."""


class SumSquares:
    """The square norms of the gradients that the optimizer is about to use.

    Args:
        parameters: The optimizer's own.
        on_error: Told what went wrong inside a hook.
        also: Called with each parameter's number and gradient.

    Attributes:
        cost_s: Host time spent since the step began.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        groups: LayerGroups,
        on_error: Callable[[Exception], None],
        also: Callable[[int, Tensor], None],
    ) -> None:
        self._parameters = list(parameters)
        self._groups = groups
        self._on_error = on_error
        self._also = also
        self._handles: list[Any] = []
        self._begin()

    def watch(self) -> None:
        """Begin a step."""
        if not self._handles:
            self._begin()
            for index, parameter in enumerate(self._parameters):
                if not parameter.requires_grad:
                    continue  # frozen since attaching
                handle = parameter.register_post_accumulate_grad_hook(self._after(index))  # type: ignore[no-untyped-call]  # torch has no types for it
                self._handles.append(handle)

    def unwatch(self) -> None:
        """Take the hooks off, and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begin()

    def take(self, sampled: frozenset[int] | None) -> Tensor:
        """By layer group; unwatches.

        Args:
            sampled: Numbers of the parameters that the samples are of; None is all.

        Raises:
            UnsupportedModelError: One of them has got no gradient.
        """
        chosen = sorted(self._squares.keys() if sampled is None else sampled)
        missing = len([index for index in chosen if index not in self._squares])
        if missing:
            raise UnsupportedModelError(
                f"backward gave gradients of {len(chosen)} parameters, and {missing} of them have not "
                "reached the optimizer: synchronise them in the last micro-batch before optimizer.step(), by "
                "set_requires_gradient_sync(True) and, with replicas, set_requires_all_reduce(True)"
            )
        squares = [self._squares[index] for index in chosen]
        parameters = [self._parameters[index] for index in chosen]
        self.unwatch()
        return self._groups.sums(squares, parameters)

    def _begin(self) -> None:
        self.cost_s = 0.0
        self._squares: dict[int, Tensor] = {}

    def _after(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            started = time.perf_counter()
            try:
                gradient = parameter.grad
                if gradient is not None:
                    # Of a sharded parameter this rank's part; the latest counts.
                    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                    self._squares[index] = square_norm(local)
                    self._also(index, gradient)
            except Exception as error:  # noqa: BLE001  training must go on
                self._on_error(error)
            self.cost_s += time.perf_counter() - started

        torch.utils.hooks.unserializable_hook(hook)  # type: ignore[no-untyped-call]  # a copy is watched by no one
        return hook


class StepwiseCapture:
    """Takes the gradients of a module that is trained step by step.

    Args:
        model: Whose forward passes are counted.
        built: The parts to measure through.
        squares: Takes the samples.
        summed: The parameters that the optimizer steps on, of those that are sampled.
        replicas: Ranks that hold each shard; None where nothing is sharded.
        carried: Asked after the samples were taken: as of Slot.

    Attributes:
        monitor: The noise scale.
    """

    def __init__(
        self,
        model: nn.Module,
        built: Assembly,
        options: Options,
        *,
        squares: SampleSquares,
        summed: Sequence[Tensor],
        replicas: int | None = None,
        carried: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self._options = options
        self._measuring = built.measuring
        self._reporter = built.reporter
        self._replicas = replicas
        self._carried = carried
        self._host_s = 0.0
        self._forwards = Forwards(built.measuring, options)
        self._alone = 0
        self._squares = squares
        self._sums = SumSquares(
            summed, groups=built.groups, on_error=built.measuring.fail, also=self._also_in_geometries
        )
        self._handles: list[Any] = [
            model.register_forward_pre_hook(UncopiedHook(self, "_before_forward"), with_kwargs=True),
            built.optimizer.register_step_pre_hook(UncopiedHook(self, "_before_step")),
            built.optimizer.register_step_post_hook(UncopiedHook(self, "_after_step")),
        ]
        self.monitor = Monitor(self, built.reporter, run=built.run)

    @property
    def passes(self) -> int:
        """Optimizer steps since attaching."""
        return self._measuring.passes

    def collect(self, *, timeout_s: float) -> bool:
        """Read what has been measured and is still on its way."""
        return self._measuring.collect(timeout_s=timeout_s)

    def leave(self) -> None:
        """Stop measuring."""
        self._measuring.leave()

    def detach(self) -> None:
        """Stop measuring and take all hooks off."""
        self.leave()
        self._unwatch()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counted = self._forwards.count(module, args, kwargs)
        if counted is None:
            return
        measured = self._measuring.decide()
        started = time.perf_counter()
        try:
            if measured:
                self._squares.watch(self._measuring.geometry)
                self._sums.watch()
            self._squares.next_micro_batch(counted)
        except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the packet
            self._measuring.fail(error)
        self._host_s += time.perf_counter() - started

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        tally = self._forwards.take()
        slot = self._measuring.begin_pass(tally, divisor=self._measuring.world_size)
        before_s, self._host_s = self._host_s, 0.0
        if slot is None:
            self._unwatch()
            return
        started = time.perf_counter()
        slot.cost_s += before_s + self._squares.cost_s + self._sums.cost_s
        try:
            self._take(slot)
        except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the packet
            self._measuring.fail(error)
        self._unwatch()
        slot.cost_s += time.perf_counter() - started
        self._measuring.send(slot)
        try:
            self._watch_for_accumulation(self._measuring.sampling.samples(tally))
        except Exception as error:  # noqa: BLE001  training must go on; all ranks are told in the next packet
            self._measuring.fail(error)

    def _take(self, slot: Slot) -> None:
        slot.unscale = self._options.unscale()  # still the one of the backward passes
        sampled = self._squares.sampled
        slot.local_squares[0] = self._squares.take(micro_batches=slot.tally.micro_batches)
        slot.carried = self._carried()
        summed = self._sums.take(sampled)
        if self._replicas is None:
            slot.global_squares[0] = summed
        else:
            slot.shard_squares = summed / self._replicas

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            self._measuring.note_learning_rate(learning_rate_of(optimizer))
        except Exception as error:  # noqa: BLE001  training must go on
            self._measuring.fail(error)

    def _also_in_geometries(self, index: int, gradient: Tensor) -> None:
        geometry = self._measuring.geometry
        if geometry is not None and self._replicas is None:
            geometry.mean(index, gradient)

    def _unwatch(self) -> None:
        self._squares.unwatch()
        self._sums.unwatch()

    def _watch_for_accumulation(self, samples: int) -> None:
        if samples > 1 or self._measuring.world_size > 1:
            self._alone = -1  # now and then a lone one may be
        elif self._alone >= 0:
            self._alone += 1
            if self._alone == PATIENCE_STEPS:
                self._reporter.refuse(NO_ACCUMULATION)
                self._measuring.leave()


def group_of_ranks(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group of these ranks; each of them calls it."""
    made = dist.new_group(ranks=sorted(ranks), use_local_synchronization=True, group_desc="noisescale data")
    if not isinstance(made, dist.ProcessGroup):
        raise RuntimeError("this process is not one of the ranks of the model's mesh")
    return made
